"""What a test may leave behind in its process, and the next would meet there: a signal's handler, a folder on
Python's path, and a part of the user's own, which another test writes anew under the same name."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ENDS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


@contextmanager
def as_it_was(folder: Path) -> Iterator[None]:
    """Afterwards handlers, current folder and path are those of before, and modules that were imported inside
    and lie below `folder` are forgotten."""
    handlers = {number: signal.getsignal(number) for number in ENDS}
    path, here, loaded = [*sys.path], Path.cwd(), {*sys.modules}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        os.chdir(here)
        sys.path[:] = path
        own = [name for name in {*sys.modules} - loaded if _lies_below(folder, name)]
        for name in own:
            del sys.modules[name]
        if own:
            importlib.invalidate_caches()
        if objective := sys.modules.get("trainer.learner.objective"):
            objective.token_loss.cache_clear()  # by import path


def _lies_below(folder: Path, name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None)
    return isinstance(file, str) and folder in Path(file).parents
