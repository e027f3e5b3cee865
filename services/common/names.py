"""What a refused name is answered with: the accepted one that is nearest to it, or all of them where they are
few; of a path that is not there, one beside it."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Collection
from itertools import islice
from pathlib import Path

NEAR = 0.7
"""Least share of two names that agrees, by difflib, where one may be a slip of the other. At 0.6 `train` is
one of `trace`, and `best` of `latest`."""
BEGUN = 3
"""Letters from which on the beginning of a name is one of its slips."""
FEW = 8
"""Up to so many accepted names are listed; of more, the nearest alone."""
LOOKED_AT = 2000
"""Names in a folder that are compared with one that is not there: some milliseconds."""


def nearest(name: str, known: Collection[str]) -> str | None:
    """The accepted name that `name` is most likely a slip of, whatever its case; None where none is like
    it."""
    lower = {k.lower(): k for k in known}
    wanted = name.lower()
    found = difflib.get_close_matches(wanted, lower, n=1, cutoff=NEAR)
    if not found and len(wanted.lstrip("-")) >= BEGUN:
        found = [k for k in lower if k.startswith(wanted)] or [
            k for k in lower if len(k) == len(wanted) and sorted(k) == sorted(wanted)
        ]
    return lower[found[0]] if found else None


def accepted(name: str, known: Collection[str]) -> str:
    """The end of a message that refuses `name`: `accepted are a, b, c; did you mean b?`"""
    near = nearest(name, known)
    guess = f"did you mean {near}?" if near else ""
    if near and len(known) > FEW:
        return guess
    return f"accepted are {', '.join(known) or 'none'}{'; ' if guess else ''}{guess}"


def near_name(name: str, known: Collection[str]) -> str:
    """`; did you mean Frage?`, the end of a message that lists the accepted names itself. Empty where none is
    like it."""
    near = nearest(name, known)
    return f"; did you mean {near}?" if near else ""


def near_path(given: str | Path, fits: Callable[[Path], bool] = Path.exists) -> str:
    """`; did you mean data/train.csv?`, of a path that is not there: one letter of the file or of a folder
    above it may be wrong. Empty where nothing is like it, or something is there. fits: what may be meant."""
    found = path_like(given, fits)
    return f"; did you mean {found}?" if found else ""


def path_like(given: str | Path, fits: Callable[[Path], bool] = Path.exists) -> Path | None:
    """The path of `near_path`."""
    path = Path(given)
    try:
        return None if not path.name or os.path.lexists(path) else _near(path, fits)
    except (OSError, ValueError):
        return None


def _near(path: Path, fits: Callable[[Path], bool]) -> Path | None:
    """The first level of the path that is not there is the one that is mistyped; below it all, or the last
    name, which may be mistyped too, must be as given."""
    top = path
    while not top.parent.exists():
        if top.parent in (top, top.parent.parent):  # the current folder has been removed
            return None
        top = top.parent
    with os.scandir(top.parent) as entries:
        beside = [entry.name for entry in islice(entries, LOOKED_AT) if not entry.name.startswith(".")]
    near = _near_file(top.name, beside)
    if near is None:
        return None
    meant = top.parent / near / path.relative_to(top)
    if os.path.lexists(meant):
        return meant if fits(meant) else None
    return _near(meant, fits) if meant.parent.is_dir() and meant != path else None


def _near_file(name: str, known: Collection[str]) -> str | None:
    """As `nearest`, the name before its endings alone: `dev.jsonl` is like `dev.json`, and not like
    `eval.jsonl`."""
    endings: dict[str, list[str]] = {}
    for one in known:
        stem, _, ending = one.partition(".")
        endings.setdefault(stem, []).append(ending)
    stem, _, ending = name.partition(".")
    own = stem if stem in endings else nearest(stem, endings)
    if own is None:
        return None
    found = ending if ending in endings[own] else nearest(ending, endings[own])
    if found is None and stem != own:
        return None
    return f"{own}.{found or min(endings[own])}".rstrip(".")
