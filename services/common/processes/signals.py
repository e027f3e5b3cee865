"""Signals that ask a process to end: SIGINT (Ctrl-C), SIGTERM, and SIGHUP (its terminal is closed).

Handlers are installed here alone. One cause may send more than one signal: `timeout` and Slurm signal their
child and then its process group; `make`, `uv run` and `npm` pass on what the terminal has already sent to
all. So a signal within REPEAT_SECONDS of the last one is the same one, and is not heard again: neither while
the first is being answered nor just after, when the handlers of before are back.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from types import FrameType
from typing import Any

REPEAT_SECONDS = 1.0
OVERDUE_SECONDS = 10.0
"""How long a call of a library may take to end after a signal."""
SERVICE = (signal.SIGINT, signal.SIGTERM)
"""What ends a service."""


def of_commands() -> tuple[signal.Signals, ...]:
    """What ends a command: SIGHUP too, except under nohup, where it is ignored and stays so."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return SERVICE if ignored else (*SERVICE, signal.SIGHUP)


class Stopped(Exception):
    """A signal ended the work, cleanly. The exit status is 128 + the signal's number.

    advice: how to go on, if there is a way."""

    def __init__(self, number: int, advice: str = "") -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}" + (f"; {advice}" if advice else ""))
        self.number = number
        self.exit_code = 128 + number
        self.advice = advice

    def with_advice(self, more: str) -> Stopped:
        """The same with more advice behind."""
        return Stopped(self.number, "; ".join(filter(None, (self.advice, more))))


class _Listener:
    """A handler that calls `receive` for each signal that does not repeat the last one. The time of arrival
    counts."""

    def __init__(
        self, receive: Callable[[int], None], last: float = float("-inf"), *, each: bool = False
    ) -> None:
        self.receive = receive
        self.last = last
        self.each = each

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.each or now - self.last >= REPEAT_SECONDS:
            self.last = now
            self.receive(number)

    def successor(self, before: Any) -> Any:
        """The handler to put back: `before`, which must not hear the repetition of a signal that was answered
        here."""
        if self.last == float("-inf"):
            return before
        if isinstance(before, _Listener):
            before.last = max(before.last, self.last)
            return before
        return _Listener(lambda number: _as(before, number), self.last)


class _Held:
    """A handler that keeps a signal for who listens next."""

    def __init__(self) -> None:
        self._came = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._came = True

    def take(self) -> bool:
        """Whether one came since the last look."""
        came = self._came
        self._came = False
        return came


def hold(number: signal.Signals) -> None:
    """From here to the end of the process this signal never ends it: one that comes is kept for
    `listening_in_loop`. For the main thread."""
    if not isinstance(signal.getsignal(number), _Held):
        signal.signal(number, _Held())
        # The interpreter's last act would be to give it its default action back.
        atexit.register(signal.signal, number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})


@contextmanager
def kept_from_children(number: signal.Signals) -> Iterator[None]:
    """A process that is started inside is not ended by this signal: one that comes waits for its `hold`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _as(handler: Any, number: int) -> None:
    """Do what a handler of `signal.getsignal` does."""
    if callable(handler):
        handler(number, None)
    elif handler != signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


@contextmanager
def listening(
    receive: Callable[[int], None], numbers: tuple[signal.Signals, ...] | None = None
) -> Iterator[None]:
    """Inside the block `receive` gets each signal of `numbers` (None: those that end a command), between two
    bytecodes of the main thread.

    It may raise. For the main thread only.
    """
    listener = _Listener(receive)
    before = {number: signal.signal(number, listener) for number in numbers or of_commands()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, listener.successor(handler))


@contextmanager
def listening_in_loop(
    receive: Callable[[int], None],
    numbers: tuple[signal.Signals, ...] | None = None,
    *,
    each: bool = False,
) -> Iterator[None]:
    """The same inside a running event loop, which makes the calls. `each`: a signal just after another one is
    heard too. A signal that `hold` has kept is heard at once."""
    loop = asyncio.get_running_loop()
    heard = numbers or of_commands()
    before = {number: signal.getsignal(number) for number in heard}

    def hand_on(number: int) -> None:
        loop.call_soon_threadsafe(receive, number)

    listener = _Listener(hand_on, each=each)
    for number, handler in before.items():
        if not isinstance(handler, _Held):
            loop.add_signal_handler(number, lambda: None)  # whichever thread it comes to, the loop is roused
        signal.signal(number, listener)  # and not the loop's: a busy loop would see two signals seconds apart
        if isinstance(handler, _Held) and handler.take():
            hand_on(number)
    try:
        yield
    finally:
        for number, handler in before.items():
            if isinstance(handler, _Held):
                # In one step: a loop that lets go of a signal makes it end processes.
                signal.signal(number, handler)
                continue
            loop.remove_signal_handler(number)
            signal.signal(number, listener.successor(handler))


@contextmanager
def raised() -> Iterator[None]:
    """For code without an event loop: the first signal raises Stopped where the code stands, later ones do
    nothing."""
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        if len(received) == 1:
            raise Stopped(number)

    with listening(stop):
        yield


@contextmanager
def cut_short(overdue: Callable[[int], None] | None = None) -> Iterator[None]:
    """Around a call of a library that blocks the main thread: the first signal ends it where it stands.

    Raises Stopped on leaving. Inside, the signal is a KeyboardInterrupt, which no library takes for a fault
    of its own and tries again. overdue: called with the signal, in a thread, where the library has not come
    back OVERDUE_SECONDS later: no Python runs in the main thread while it is in a call of C."""
    with _watched(overdue) if overdue else nullcontext(), _interrupted():
        yield


@contextmanager
def _watched(overdue: Callable[[int], None]) -> Iterator[None]:
    left = threading.Event()
    read, write = socket.socketpair()
    write.setblocking(False)
    heard = of_commands()

    def watch() -> None:
        number = read.recv(1)
        while (
            number and number[0] not in heard
        ):  # of a handler that the user's code has set for another signal
            number = read.recv(1)
        if number and not left.wait(OVERDUE_SECONDS):
            overdue(number[0])

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    before = signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        left.set()
        write.close()
        watcher.join()
        read.close()


@contextmanager
def _interrupted() -> Iterator[None]:
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        if len(received) == 1:
            raise KeyboardInterrupt

    with listening(stop):
        try:
            yield
        except KeyboardInterrupt:
            if received:
                raise Stopped(received[0]) from None
            raise
        except SystemExit as error:  # by a handler that the library has put in place of this one
            if error.code in of_commands():
                raise Stopped(int(error.code)) from None
            raise


@asynccontextmanager
async def cancelled(say: Callable[[str], None]) -> AsyncIterator[None]:
    """The first signal cancels the current task, which leaves as Stopped; later ones do not cut its clean end
    short."""
    task = asyncio.current_task()
    assert task is not None  # a coroutine runs in one
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        if len(received) == 1:
            say(f"{signal.Signals(number).name}: finishing up")
            task.cancel()

    with listening_in_loop(stop):
        try:
            yield
        except asyncio.CancelledError:
            if received:
                raise Stopped(received[0]) from None
            raise


@contextmanager
def remembered(
    on_signal: Callable[[int], None] = lambda number: None, numbers: tuple[signal.Signals, ...] = SERVICE
) -> Iterator[list[int]]:
    """For a service: the signals that came, and `on_signal`, called for each, which tells the server to
    stop."""
    received: list[int] = []

    def remember(number: int) -> None:
        received.append(number)
        on_signal(number)

    with listening(remember, numbers):
        yield received


def stop_servers(servers: list[Any], number: int) -> None:
    """Tell uvicorn servers to drain and end; a second SIGINT drops what is in flight. Their own handlers must
    be off.

    These take the repetition of a signal for a second one; `services.common.http.serving` leaves them out.
    """
    for server in servers:
        server.force_exit = server.should_exit and number == signal.SIGINT
        server.should_exit = True


@contextmanager
def ending_at_once() -> Iterator[None]:
    """For a process that loads before it serves, and so has nothing to finish: a signal ends it where it
    is."""
    with listening(lambda number: os._exit(128 + number), SERVICE):
        yield


def left_to_parent() -> None:
    """For one of several processes of a service: Ctrl-C reaches all of them, and their parent tells each when
    to end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def kept() -> Iterator[None]:
    """What a library installs inside is undone on leaving."""
    before = {number: signal.getsignal(number) for number in (*SERVICE, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
