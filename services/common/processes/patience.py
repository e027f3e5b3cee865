"""A limit for a start that counts progress: on a busy machine the same work takes many times as long."""

from __future__ import annotations

import time
from collections.abc import Callable

LOOK_SECONDS = 5.0
"""Time over which progress is measured."""
LEAST_SHARE = 0.01
"""Share of a core below which a process makes no progress."""
MOST = 10.0
"""Times the limit that may pass by the clock, however much is done."""


class Patience:
    """A time in which a process makes progress counts by the processor time that it used, any other by the
    clock: so one that hangs has `seconds`, and one that waits for a core has as long as its work takes."""

    def __init__(
        self, seconds: float, used: Callable[[], float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """used: processor seconds that the process has used so far."""
        self.seconds = seconds
        self.look_seconds = min(LOOK_SECONDS, seconds / 4)
        self._used = used
        self._clock = clock
        self._began = self._looked = clock()
        self._before = used()
        self._spent = 0.0

    @property
    def passed(self) -> float:
        """Seconds by the clock."""
        return self._clock() - self._began

    def over(self) -> bool:
        """Whether the limit is reached. To be asked again and again."""
        now = self._clock()
        time_passed = now - self._looked
        if time_passed >= self.look_seconds:
            used = self._used()
            done = used - self._before
            # Processes that have ended since are missing from the sum.
            self._spent += done if LEAST_SHARE * time_passed <= done < time_passed else time_passed
            self._before = used
            self._looked = now
        return self._spent >= self.seconds or self.passed >= MOST * self.seconds

    def __str__(self) -> str:
        """What passed by the clock where it is more than the limit: `, 98 s by the clock`; otherwise ""."""
        return f", {self.passed:.0f} s by the clock" if self.passed > 1.2 * self.seconds else ""
