"""A user's packages with the names of Unspiral's own, which processes that are started in their folder would
import instead."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from pathlib import Path

from services.common.errors import EnvironmentLacks

_MARKS = {"services": "contracts.py", "trainer": "commands", "retriever_service": "index_folder"}
"""Of each package of ours what no other one has."""


def refuse_others_here(folder: Path | None = None) -> None:
    """Raise EnvironmentLacks where a folder, by default the current one, has a package of one of these names
    that is none of Unspiral's: workers of Ray, and `python -m`, look there first."""
    here = (folder or Path.cwd()).resolve()
    for name, mark in _MARKS.items():
        spec = PathFinder.find_spec(name, [str(here), *sys.path])
        places = [] if spec is None else [*(spec.submodule_search_locations or ()), spec.origin or ""]
        if any((Path(place) / mark).exists() for place in places):
            continue
        if place := next((place for place in places if place and Path(place).is_relative_to(here)), None):
            raise EnvironmentLacks(
                f"{place}: the workers of a run look here first, and would import it in place of Unspiral's "
                f"own `{name}`; name yours otherwise, or start the run in another folder"
            )
