"""How a run is stopped from outside, by SIGINT (Ctrl-C), SIGTERM, or SIGHUP (its terminal is closed; not
under nohup).

The first signal lets the step in hand come to its end, so that it is recorded and saved; the second, or the
first where no step is in hand, cuts the run short; one more leaves it all as it is. A run that is cut short
saves its last whole step first, if the learner still has that step's weights. A signal within
`services.common.processes.signals.REPEAT_SECONDS` of the last one is that one again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from services.common.processes import signals
from trainer.session import output

STEP_GRACE_SECONDS = 60.0
"""Longest wait for the step in hand after the first signal, where none is given."""
GRACE = "trainer.stop_grace_seconds"
"""The setting that gives it."""
LEAVE_SECONDS = 90.0
"""Longest wait for a clean end once the run is cut short; then the process exits without one."""


class StopSignals:
    """Listens, as a context inside a running event loop, on behalf of the task that enters it."""

    def __init__(
        self,
        say: Callable[[str], None],
        grace_seconds: float | None = None,
        kept: Callable[[], str] = lambda: "",
    ) -> None:
        """grace_seconds: longest wait for the step in hand after the first signal. kept: says what a run
        keeps whose step is cut short."""
        self.say = say
        self.grace_seconds = STEP_GRACE_SECONDS if grace_seconds is None else grace_seconds
        self.kept = kept
        self.number: int | None = None
        """The first signal that came."""
        self.error: Exception | None = None
        """Why the run was ended from inside."""
        self._in_step = self._saving = self._ending = self._done = False
        self._timer: asyncio.TimerHandle | None = None
        self._leave: threading.Timer | None = None

    def __enter__(self) -> StopSignals:
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None, "StopSignals is entered inside a running event loop"
        self._task = task
        self._listening = ExitStack()
        self._listening.enter_context(signals.listening_in_loop(self.receive))
        return self

    def __exit__(self, *error: object) -> None:
        self._listening.close()
        if self._leave:
            self._leave.cancel()

    @property
    def requested(self) -> bool:
        """Whether no further step should begin."""
        return self.number is not None or self.error is not None

    @contextmanager
    def step_in_hand(self) -> Iterator[None]:
        """Inside, the first signal waits for the end, `grace_seconds` at most."""
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False
            if self._timer:
                self._timer.cancel()
                self._timer = None

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Inside, the first signal waits for the end, as does one that came in the step before: it would cost
        the steps that are being saved.

        A run that ends waits as well, for as long as the learner takes (`learner.step_timeout_seconds`)."""
        self._saving = True
        try:
            yield
        finally:
            self._saving = False
            if self._ending:
                self._begin_the_end()

    def receive(self, number: int) -> None:
        """React to a signal."""
        if self._ending:
            self._hurry(number)
            return
        name = signal.Signals(number).name
        first = self.number is None
        self.number = number if first else self.number
        if first and self._saving:
            self.say(f"{name}: saving the last steps; a second signal stops at once")
        elif first and self._in_step:
            kept = self.kept()
            self.say(
                f"{name}: finishing this step, for {self.grace_seconds:g} s at most ({GRACE}); "
                f"{kept and f'cut short then, {kept}; '}a second signal stops at once"
            )
            self._end_step_within(self.grace_seconds, GRACE)
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
        """Begin no further step; the run leaves with `error` once it has saved. A step in hand has so many
        seconds."""
        if self._ending or self.error is not None:
            return
        self.error = error
        self.say(f"{error}: stopping")
        if not self._in_step and not self._saving:
            self._cancel()
        elif self._in_step:
            self._end_step_within(seconds)

    def settle(self) -> None:
        """The run's work is done: a signal no longer cuts its clean end short. Raises Stopped where one came
        before."""
        self._begin_the_end()
        self._done = True
        if self.number is not None:
            raise signals.Stopped(self.number)

    def _end_step_within(self, seconds: float, key: str = "") -> None:
        """The step in hand has so many seconds, by a setting, or fewer where it was given fewer before."""
        over = self._loop.time() + seconds
        if self._timer is not None:
            if self._timer.when() <= over:
                return
            self._timer.cancel()  # a timer that outlives its step would cut what comes after
        self._timer = self._loop.call_at(over, self._end_of_grace, seconds, key)

    def _end_of_grace(self, seconds: float, key: str) -> None:
        self._timer = None
        if not self._saving:  # the step is done then, and ends with what saves it
            longer = f" ({key} gives it more)" if key else ""
            self.say(f"the step is not done after {seconds:g} s: stopping{longer}")
            self._cancel()

    def _cancel(self) -> None:
        self._begin_the_end()
        self._task.cancel()

    def _begin_the_end(self) -> None:
        """Give the clean end LEAVE_SECONDS, counted from the last call."""
        self._ending = True
        if self._leave is not None:
            self._leave.cancel()
        self._leave = threading.Timer(LEAVE_SECONDS, self._leave_as_it_is)
        self._leave.daemon = True
        self._leave.start()

    def _hurry(self, number: int) -> None:
        """A signal while everything ends: leave now. Where the run's work was done, the first one is only
        answered."""
        name = signal.Signals(number).name
        if self._done:
            self._done = False
            self.say(f"{name}: the run is done and ends; another signal leaves as it is")
            return
        self.say(f"{name}: leaving as it is")
        output.drain()
        os._exit(128 + number)

    def _leave_as_it_is(self) -> None:
        if self._saving:  # the wait begins anew after it
            return
        self.say(f"no clean end within {LEAVE_SECONDS:g} s: leaving")
        output.drain()
        os._exit(128 + self.number if self.number else 1)
