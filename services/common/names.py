"""What a refused name is answered with: the accepted one that is nearest to it, or all of them where they are
few."""

from __future__ import annotations

import difflib
from collections.abc import Collection

FEW = 8
"""Up to so many accepted names are listed; of more, the nearest alone."""


def nearest(name: str, known: Collection[str]) -> str | None:
    """The accepted name that `name` is most likely a slip of, whatever its case; None where none is like
    it."""
    lower = {k.lower(): k for k in known}
    found = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.6)
    return lower[found[0]] if found else None


def accepted(name: str, known: Collection[str]) -> str:
    """The end of a message that refuses `name`: `accepted are a, b, c; did you mean b?`"""
    near = nearest(name, known)
    guess = f"did you mean {near}?" if near else ""
    if near and len(known) > FEW:
        return guess
    return f"accepted are {', '.join(known) or 'none'}{'; ' if guess else ''}{guess}"
