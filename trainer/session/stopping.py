"""How a run is stopped from outside, by SIGINT (Ctrl-C), SIGTERM, or SIGHUP (its terminal is closed; not under nohup).

The first signal lets the step in hand come to its end, so that it is recorded and saved; the second, or the first where no step is
in hand, ends the run at once, with what was started; one more leaves it all as it is.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from trainer.session import output

STEP_GRACE_SECONDS = 60.0
"""Longest wait for the step in hand after the first signal."""
LEAVE_SECONDS = 90.0
"""Longest wait for what was started to end, once the run is cut short; then the process ends as it is."""


REPEAT_SECONDS = 1.0
"""A signal so soon after another, once the run ends, is the same one: a terminal and a wrapper may both pass it on."""


def heard() -> tuple[signal.Signals, ...]:
    """The signals that stop a run. Under nohup SIGHUP is ignored, and stays so."""
    hangup = () if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGINT, signal.SIGTERM, *hangup)


class Interrupted(Exception):
    """The run was ended by a signal, cleanly. The exit status is 128 + the signal's number."""

    def __init__(self, number: int, advice: str = "go on with --resume latest") -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}; {advice}")
        self.number, self.exit_code = number, 128 + number


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside, on the main thread without an event loop, a signal raises Interrupted where the code stands."""

    def stop(number: int, _: Any) -> None:
        raise Interrupted(number)

    before = {number: signal.signal(number, stop) for number in heard()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StopSignals:
    """Listens, as a context inside a running event loop, on behalf of the task that enters it."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.number: int | None = None
        """The first signal that came."""
        self.error: Exception | None = None
        """Why the run was ended from inside."""
        self._in_step = self._saving = self._ending = self._done = False
        self._last = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._leave: threading.Timer | None = None

    def __enter__(self) -> StopSignals:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._heard = heard()
        for number in self._heard:
            self._loop.add_signal_handler(number, self.receive, number)
        return self

    def __exit__(self, *_: object) -> None:
        for number in self._heard:
            self._loop.remove_signal_handler(number)
        if self._leave:
            self._leave.cancel()

    @property
    def requested(self) -> bool:
        """Whether no further step should begin."""
        return self.number is not None or self.error is not None

    @contextmanager
    def step_in_hand(self) -> Iterator[None]:
        """Inside, the first signal waits for the end, STEP_GRACE_SECONDS at most."""
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False
            if self._timer:
                self._timer.cancel()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Inside, the first signal waits for the end, as does one that came in the step before: it would cost the steps that are being saved."""
        self._saving = True
        try:
            yield
        finally:
            self._saving = False

    def receive(self, number: int) -> None:
        """What a signal does."""
        if self._ending:
            self._hurry(number)
            return
        name, first = signal.Signals(number).name, self.number is None
        self.number = number if first else self.number
        if first and self._saving:
            self.say(f"{name}: saving the last steps; a second signal stops at once")
        elif first and self._in_step:
            self.say(
                f"{name}: finishing this step, for {STEP_GRACE_SECONDS:g} s at most; a second signal stops at once"
            )
            self._timer = self._loop.call_later(STEP_GRACE_SECONDS, self._end_of_grace)
        else:
            self.say(f"{name}: stopping")
            self._cancel()

    def abort(self, error: Exception) -> None:
        """End the run at once; it leaves with `error`."""
        if not self._ending:
            self.error = error
            self.say(f"{error}: stopping")
            self._cancel()

    def end_soon(self, error: Exception, seconds: float) -> None:
        """Begin no further step; the run leaves with `error` once it has saved. A step in hand has so many seconds."""
        if self._ending or self.error is not None:
            return
        self.error = error
        self.say(f"{error}: stopping")
        if not self._in_step and not self._saving:
            self._cancel()
        elif self._in_step:
            self._timer = self._loop.call_later(seconds, self._end_of_grace)

    def settle(self) -> None:
        """The run's work is done: a signal no longer cuts its clean end short. Raises Interrupted where one came before."""
        self._begin_the_end()
        self._done = True
        if self.number is not None:
            raise Interrupted(self.number)

    def _end_of_grace(self) -> None:
        if not self._saving:  # the step is done then, and ends with what saves it
            self._cancel()

    def _cancel(self) -> None:
        self._begin_the_end()
        self._task.cancel()

    def _begin_the_end(self) -> None:
        """What was started must still be ended, but not for ever."""
        self._ending, self._last = True, time.monotonic()
        if self._leave is not None:
            return
        self._leave = threading.Timer(LEAVE_SECONDS, self._leave_as_it_is)
        self._leave.daemon = True
        self._leave.start()

    def _hurry(self, number: int) -> None:
        """A signal while everything ends: leave now. Where the run's work was done, the first one is only answered."""
        again = time.monotonic() - self._last < REPEAT_SECONDS
        self._last = time.monotonic()
        if again:
            return
        name = signal.Signals(number).name
        if self._done:
            self._done = False
            self.say(f"{name}: the run is done and ends; another signal leaves as it is")
            return
        self.say(f"{name}: leaving as it is")
        output.drain()
        os._exit(128 + number)

    def _leave_as_it_is(self) -> None:
        self.say(f"no clean end within {LEAVE_SECONDS:g} s: leaving")
        output.drain()
        os._exit(128 + self.number if self.number else 1)
