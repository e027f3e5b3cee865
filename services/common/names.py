"""What a refused name is answered with: the accepted one that is nearest to it, or all of them where they are
few."""

from __future__ import annotations

import difflib
from collections.abc import Collection

NEAR = 0.7
"""Least share of two names that agrees, by difflib, where one may be a slip of the other. At 0.6 `train` is
one of `trace`, and `best` of `latest`."""
BEGUN = 3
"""Letters from which on the beginning of a name is one of its slips."""
FEW = 8
"""Up to so many accepted names are listed; of more, the nearest alone."""


def nearest(name: str, known: Collection[str]) -> str | None:
    """The accepted name that `name` is most likely a slip of, whatever its case; None where none is like
    it."""
    lower = {k.lower(): k for k in known}
    wanted = name.lower()
    found = difflib.get_close_matches(wanted, lower, n=1, cutoff=NEAR)
    if not found and len(wanted.lstrip("-")) >= BEGUN:
        found = [k for k in lower if k.startswith(wanted)]
    return lower[found[0]] if found else None


def accepted(name: str, known: Collection[str]) -> str:
    """The end of a message that refuses `name`: `accepted are a, b, c; did you mean b?`"""
    near = nearest(name, known)
    guess = f"did you mean {near}?" if near else ""
    if near and len(known) > FEW:
        return guess
    return f"accepted are {', '.join(known) or 'none'}{'; ' if guess else ''}{guess}"
