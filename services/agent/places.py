"""How many questions are worked on at the same time, and how many may wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.common.counting import counted
from services.common.deadlines import within
from services.common.errors import EnvironmentLacks


class Places:
    """Used on one event loop; whoever waits has its turn in order."""

    def __init__(self, running: int, waiting: int, wait_seconds: float) -> None:
        self._running = running
        self._waiting = waiting
        self._wait_seconds = wait_seconds
        self._free = asyncio.Semaphore(running)
        self.taken = 0
        """Questions that run or wait."""

    @property
    def running(self) -> int:
        return min(self.taken, self._running)

    @property
    def waiting(self) -> int:
        return max(0, self.taken - self._running)

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """A place, once one is free. Raises EnvironmentLacks: 429 where too many wait already, 503 after
        `wait_seconds`."""
        if self.taken >= self._running + self._waiting:
            running = counted(self._running, "question")
            raise EnvironmentLacks(
                f"{running} in work and {self._waiting} waiting, the most that are accepted", status=429
            )
        self.taken += 1
        try:
            late = f"no place was free within {self._wait_seconds:g} s"
            async with within(self._wait_seconds, lambda: EnvironmentLacks(late)):
                await self._free.acquire()
            try:
                yield
            finally:
                self._free.release()
        finally:
            self.taken -= 1
