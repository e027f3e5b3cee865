"""What a server says on its terminal while its index loads: a line every 15 s, and one where it is stopped
before it was ready."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from services.common.http.serving import tell_of_signal
from services.common.processes.beside import beside

SECONDS = 15.0
"""Between two lines."""
Say = Callable[[str], None]


@contextmanager
def telling(loading: Callable[[], str], say: Say) -> Iterator[None]:
    """Inside, `say` is told every SECONDS, from a thread of its own, what is loading; nothing while `loading`
    gives an empty line."""
    began = time.monotonic()

    def tell(over: threading.Event) -> None:
        while not over.wait(SECONDS):
            if line := loading():
                say(f"still loading {line}; {time.monotonic() - began:.0f} s so far")

    with beside(tell, "still-loading"):
        yield


class Cut:
    """Whether a server was ready before a signal ended it."""

    def __init__(self, on_ready: Say) -> None:
        self._on_ready = on_ready
        self._was_ready = False

    def ready(self, url: str) -> None:
        """In place of `on_ready`."""
        self._was_ready = True
        self._on_ready(url)

    def tell(self, status: int, say: Say) -> None:
        """Say which signal has ended the server, and that its loading was cut off where nothing was ready."""
        tell_of_signal(status, say, "" if self._was_ready else "the index was loading")
