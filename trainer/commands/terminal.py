"""How commands end, for people and for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any


def for_people(as_json: bool) -> bool:
    """Whether results are printed in words: on a terminal, unless JSON is asked for. Programs read a pipe."""
    return not as_json and sys.stdout.isatty()


def ending(words: str, result: Mapping[str, Any], as_json: bool) -> str:
    """How a command ends that has printed its progress: in words on a terminal; in a pipe with the result as
    JSON on a last line after them; with --json as that line alone."""
    if for_people(as_json):
        return words
    line = json.dumps(result)
    return line if as_json else f"{words}\n{line}"


@contextmanager
def prints_aside(as_json: bool) -> Iterator[None]:
    """Inside, what parts of the user's own print goes to standard error where a program reads the result."""
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        yield
