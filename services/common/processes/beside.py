"""Work in a thread of its own for as long as a block runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def beside(work: Callable[[threading.Event], None], name: str, end_seconds: float = 0.0) -> Iterator[None]:
    """Inside, `work` runs in a daemon thread called `name`; it is to return soon after the event that it is
    given is set, which happens at the end. That waits for it for `end_seconds` at most."""
    over = threading.Event()
    thread = threading.Thread(target=work, args=(over,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(end_seconds)
