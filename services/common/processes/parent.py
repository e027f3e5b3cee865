"""A process that must not outlive the one that started it by `multiprocessing`."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable


def when_parent_ends(act: Callable[[], None]) -> None:
    """Have `act` called, from a thread, once the process that started this one is gone, however it ended.

    Nothing happens in a process that `multiprocessing` did not start."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        act()

    threading.Thread(target=wait, name="parent", daemon=True).start()
