"""Learner and workers that share GPUs use them in turns: an engine starts in the workers' turn alone, and where there is no sharing it is always theirs."""

from __future__ import annotations

import asyncio


class Turns:
    """Whose turn it is, as far as workers that start are concerned."""

    def __init__(self) -> None:
        self._workers = asyncio.Event()
        self._workers.set()
        self._starting: set[asyncio.Task] = set()

    async def before_engine(self) -> None:
        """Return in the workers' turn. Until the calling task ends, the learner's waits for it."""
        await self._workers.wait()
        task = asyncio.current_task()
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def of_learner(self, timeout_seconds: float) -> None:
        """No engine starts from here on; those that are starting are waited for, and given up after `timeout_seconds`."""
        self._workers.clear()
        if self._starting:
            _, late = await asyncio.wait(self._starting, timeout=timeout_seconds)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def of_workers(self) -> None:
        self._workers.set()
