"""SIGINT and SIGTERM as exceptions, so that what was started is ended and what was written aside is removed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(Exception):
    """A signal ended the work, cleanly. The exit status is 128 + the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number


@asynccontextmanager
async def cancelled_by_signals(say: Callable[[str], None]) -> AsyncIterator[None]:
    """The first signal cancels the current task, which leaves as Stopped; later ones do not cut its clean stop short."""
    task, received = asyncio.current_task(), []

    def stop(number: int) -> None:
        if not received:
            received.append(number)
            say(f"{signal.Signals(number).name}: finishing up")
            task.cancel()

    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        loop.add_signal_handler(number, stop, number)
    try:
        yield
    except asyncio.CancelledError:
        if received:
            raise Stopped(received[0]) from None
        raise
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


@contextmanager
def raised_by_signals() -> Iterator[None]:
    """For code without an event loop, in the main thread: the first signal raises Stopped, later ones do nothing."""

    def stop(number: int, frame: FrameType | None) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
