"""How long a scan takes still."""

from __future__ import annotations

import time

_LEAST_SECONDS = 2.0
"""Before that the pace says nothing."""


class Pace:
    """The pace of this run: what an interrupted one did before does not count."""

    def __init__(self, position: int) -> None:
        self._begin = position
        self._started = time.monotonic()

    def left(self, position: int, end: int) -> str:
        """The time to the end, such as `3 min left`; empty while nothing can be said."""
        passed = time.monotonic() - self._started
        done = position - self._begin
        if passed < _LEAST_SECONDS or done <= 0 or position >= end:
            return ""
        seconds = passed * (end - position) / done
        if seconds < 90:
            return f"{seconds:.0f} s left"
        minutes = seconds / 60
        return f"{minutes:.0f} min left" if minutes < 90 else f"{minutes / 60:.1f} h left"
