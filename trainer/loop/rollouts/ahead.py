"""Batches that are sampled while the learner updates."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from services.contracts import Trajectory
from trainer.config.schema import Config
from trainer.loop.rollouts.sampling import BatchSampler, RolloutBatch


class BatchesAhead:
    """The batch of the step in hand, and with `rollout.max_staleness` k the k batches after it."""

    def __init__(
        self, config: Config, sampler: BatchSampler, on_done: Callable[[Trajectory], None] | None
    ) -> None:
        self.config = config
        self.sampler = sampler
        self.on_done = on_done
        self._sampling: deque[asyncio.Task[RolloutBatch]] = deque()

    async def take(self, step: int) -> asyncio.Task[RolloutBatch]:
        """The batch of a step, which is being sampled or done, with the sampling of those after it begun."""
        after = min(self.config.rollout.max_staleness, self.config.trainer.steps - step)
        while len(self._sampling) <= after:
            batch = self.sampler.sample(step + len(self._sampling), self.on_done)
            self._sampling.append(asyncio.create_task(batch))
            # The task runs up to its first request here, so that batches take their prompts in order.
            await asyncio.sleep(0)
        return self._sampling.popleft()

    async def cancel(self) -> None:
        """Sample no further; what was sampled for later steps is lost."""
        for task in self._sampling:
            task.cancel()
        await asyncio.gather(*self._sampling, return_exceptions=True)
        self._sampling.clear()
