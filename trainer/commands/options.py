"""Arguments that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[Path, typer.Option("--config", help="Configuration file (YAML).")]
AsJson = Annotated[
    bool, typer.Option("--json", help="As JSON, on a terminal too. Elsewhere it is always JSON.")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Changes to it, such as learner.lr=1e-5 run.name=mine.")
]
