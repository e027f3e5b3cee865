"""The command `unspiral` of an installation. A package of the user's may stand in the place of `trainer`:
this says so in one line, and so needs nothing of ours itself. Of the other two `trainer.name_clash` tells."""

import sys
from importlib.util import find_spec
from pathlib import Path

LACKS = 3


def main() -> None:
    """The command line; ends with 3 where Python finds another `trainer` first."""
    try:
        from trainer.__main__ import main as run
    except ImportError as error:
        place = place_of("trainer") if (error.name or "").partition(".")[0] == "trainer" else None
        if place is None or place.parent == Path(__file__).resolve().parents[1]:
            raise  # of our own, which is told as it is
        print(
            f"unspiral: Python finds {place} in place of Unspiral's own package `trainer`: name yours "
            f"otherwise, or leave {place.parent} out of PYTHONPATH",
            file=sys.stderr,
        )
        sys.exit(LACKS)
    run()


def place_of(name: str) -> Path | None:
    """The folder or file that Python imports by this name; None where it knows none."""
    spec = find_spec(name)
    if spec is None:
        return None
    place = next(iter(spec.submodule_search_locations or ()), spec.origin)
    return Path(place).resolve() if place else None
