"""Text of models and documents on a terminal: nothing in it may act on the terminal."""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Mapping
from typing import Any

_SHOWN = "\N{REPLACEMENT CHARACTER}"
_KEPT = frozenset("\n\t\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}")


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


def harmless(text: str) -> str:
    """The text with a replacement character for each control character (escape codes begin with one), lone
    surrogate and direction mark."""
    return "".join(
        c if c in _KEPT or unicodedata.category(c) not in ("Cc", "Cf", "Cs") else _SHOWN for c in text
    )


def in_one_line(text: str, most: int) -> str:
    """The text on one line of at most `most` characters; three dots stand for what is cut."""
    line = " ".join(harmless(text[: 8 * most]).split())
    return line if len(line) <= most and len(text) <= 8 * most else line[: most - 3] + "..."
