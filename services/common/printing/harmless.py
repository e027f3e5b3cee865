"""Text of models and documents on a terminal: nothing in it may act on the terminal."""

from __future__ import annotations

import io
import sys
import unicodedata

_SHOWN = "\N{REPLACEMENT CHARACTER}"
_KEPT = frozenset("\n\t\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}")


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


def print_whatever_comes() -> None:
    """Have a question mark printed for what the locale's encoding lacks, or a file's name that is no UTF-8
    holds: output in a language of its own must not end a command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")
