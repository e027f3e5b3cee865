"""Arguments that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.common.errors import UserError
from services.common.printing.help_pages import REPLACES
from services.common.runs.paths import BEST, LATEST, in_runs
from trainer.commands import completion

ConfigFile = Annotated[Path, typer.Option("--config", help="Configuration file (YAML).")]
AsJson = Annotated[
    bool, typer.Option("--json", help="As JSON: the last line of the output, on a terminal too.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        autocompletion=completion.changes,
        help="Changes to the configuration, such as learner.lr=1e-5 run.name=mine.",
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help=REPLACES)]
OF_ANY_RUN = "latest or best: of the run in runs/ that was written to last"
"""Behind CHECKPOINT, in a command that knows no run."""


def names_run(word: str) -> bool:
    """Whether a word is a run, something in one, `latest` or `best`."""
    return word in (LATEST, BEST) or in_runs(word).exists()


def refuse_run(option: str, overrides: list[str]) -> None:
    """Raises UserError for a run among the changes KEY=VALUE of a command that takes it by an option."""
    run = next((word for word in overrides if "=" not in word and names_run(word)), None)
    if run is not None:
        raise UserError(f"override {run!r}: expected key=value; did you mean {option} {run}?")
