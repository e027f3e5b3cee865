"""Learner and workers that share GPUs use them in turns: an engine starts in the workers' turn alone, and
where there is no sharing it is always theirs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

LOOK_SECONDS = 0.2
"""Time between two looks at the workers that start and wait in vain."""


class Turns:
    """Holds back workers that start until it is the workers' turn."""

    def __init__(self) -> None:
        self._workers = asyncio.Event()
        self._workers.set()
        self._starting: set[asyncio.Task] = set()

    async def before_engine(self) -> None:
        """Return in the workers' turn. Until the calling task ends, the learner's waits for it."""
        while not self._workers.is_set():
            await self._workers.wait()
        task = asyncio.current_task()
        assert task is not None  # a coroutine runs in one
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def give_to_learner(
        self, timeout_seconds: float, in_vain: Callable[[], set[asyncio.Task]] = set
    ) -> None:
        """No engine starts from here on. Those that are starting are waited for, and given up after
        `timeout_seconds`; at once those that wait `in_vain`: for what only the learner can send, after its
        turn."""
        self._workers.clear()
        deadline = time.monotonic() + timeout_seconds
        while self._starting:
            left = deadline - time.monotonic()
            for task in self._starting & in_vain() if left > 0 else self._starting:
                task.cancel()
            await asyncio.wait(self._starting, timeout=min(left, LOOK_SECONDS) if left > 0 else LOOK_SECONDS)

    def give_to_workers(self) -> None:
        self._workers.set()
