"""Arguments that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
NAMED = "A checkpoint, a run's folder (its newest checkpoint)"
"""The beginning of the help of what names a checkpoint."""
