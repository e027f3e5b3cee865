"""How commands end, for people and for programs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
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
    """Inside, what parts of the user's own print goes to standard error where a program reads the result;
    what programs print that they start, too."""
    with ExitStack() as stack:
        if as_json:
            stack.enter_context(redirect_stdout(sys.stderr))
            stack.enter_context(_file_aside())
        yield


@contextmanager
def _file_aside() -> Iterator[None]:
    """Inside, the file of standard output is that of standard error."""
    try:
        kept = os.dup(1)
    except OSError:  # it is closed
        yield
        return
    try:
        with suppress(OSError):
            os.dup2(2, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
