"""Calls of the learner from the loop, one at a time, in a thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar

from trainer.loop.run.progress import Progress
from trainer.loop.run.run_state import RunState
from trainer.loop.run.spans import StepClock

T = TypeVar("T")


class LearnerCalls:
    """Carries out the learner's calls, and knows which one is under way."""

    def __init__(self, state: RunState, progress: Progress, clock: StepClock) -> None:
        self.state = state
        self.progress = progress
        self.clock = clock
        self.doing: str | None = None
        """The call that the learner is carrying out."""
        self.returned = 0
        """Calls of the learner that have returned."""

    async def __call__(self, call: Callable[..., T], *arguments: Any, **options: Any) -> tuple[T, float]:
        """A learner's call in a thread, so that rollouts go on. Returns its result and its seconds."""
        self.doing = call.__name__.replace("_", " ")
        self.progress.stage(self.doing, self.state.shown_step)
        began = time.monotonic()
        try:
            with self.clock.measure(f"learner: {self.doing}"):
                return await asyncio.to_thread(call, *arguments, **options), time.monotonic() - began
        finally:
            self.doing = None
            self.returned += 1
