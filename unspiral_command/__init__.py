"""The command `unspiral` of an installation. It says in one line that a package of the user's stands in the
place of one of Unspiral's, and so needs nothing of them itself."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

OURS = ("services", "trainer", "retriever_service")
OF_TRAINER = "name_clash.py"
"""A file that Unspiral's `trainer` has, and no other by accident."""
LACKS = 3


def main() -> None:
    """The command line; ends with 3 where Python finds another package by the name of one of ours first."""
    found = place_of("trainer")
    if found is not None and not (found / OF_TRAINER).is_file():
        refuse(found, "trainer")  # unread: a `__main__.py` of its own would be run in place of ours
    try:
        from trainer.__main__ import main as run
    except ImportError as error:
        name = (error.name or "").partition(".")[0]
        place = place_of(name) if name in OURS else None
        if place is None or place.parent == Path(__file__).resolve().parents[1]:
            raise  # of our own, which is told as it is
        refuse(place, name)
    run()


def refuse(place: Path, name: str) -> NoReturn:
    """End with the line about a package by the name of one of ours."""
    print(
        f"unspiral: Python finds {place} in place of Unspiral's own package `{name}`: name yours "
        f"otherwise, or leave {place.parent} out of PYTHONPATH",
        file=sys.stderr,
    )
    sys.exit(LACKS)


def place_of(name: str) -> Path | None:
    """The folder or file that Python imports by this name; None where it knows none."""
    spec = find_spec(name)
    if spec is None:
        return None
    place = next(iter(spec.submodule_search_locations or ()), spec.origin)
    return Path(place).resolve() if place else None
