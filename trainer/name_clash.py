"""A project's own package that stands before one of Unspiral's at the top level. Imports nothing of ours,
which may be what is not found."""

from __future__ import annotations

import sys
from pathlib import Path

PACKAGES = ("services", "retriever_service")
"""Another `trainer` is found before this is (`unspiral_command`)."""
LACKS = 3
"""Exit status: the environment lacks ours."""
_OURS = Path(__file__).resolve().parents[1]


def clash_of(error: ImportError) -> str | None:
    """The line for an import of ours that has found somebody else's package; None for any other error."""
    package = (error.name or "").partition(".")[0]
    found = sys.modules.get(package)
    if package not in PACKAGES or found is None:
        return None
    places = [Path(place).resolve() for place in getattr(found, "__path__", ())]
    place = Path(str(found.__file__)).resolve() if not places and found.__file__ else None
    theirs = next((p for p in [*places, *([place] if place else [])] if p.parent != _OURS), None)
    if theirs is None:
        return None
    return (
        f"Python finds {theirs} in place of Unspiral's own package `{package}`: name yours otherwise, or "
        f"leave {theirs.parent} out of PYTHONPATH"
    )
