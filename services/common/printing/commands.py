"""Commands in hints and errors, as they can be typed here: `unspiral` alone where a shell would find it."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path

NAME = "unspiral"
_COMMAND = re.compile(rf"(?<![\w./~-]){NAME}(?= [a-z]| --)")


def typed(text: str) -> str:
    """The text with the way to call the program in place of each `unspiral COMMAND`."""
    way = program()
    return text if way == NAME else _COMMAND.sub(lambda _: way, text)


def program() -> str:
    """What calls this program from the current folder: `unspiral` where it is on the PATH; otherwise the
    script beside the interpreter that runs, such as `.venv/bin/unspiral`; where there is none, `python -m
    trainer` with that interpreter."""
    if shutil.which(NAME):
        return NAME
    interpreter = Path(sys.executable)  # as it was called: resolved, a virtual environment would be left
    script = interpreter.with_name(NAME)
    if script.exists():
        return shlex.quote(_from_here(script))
    return f"{shlex.quote(_from_here(interpreter))} -m trainer"


def _from_here(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
