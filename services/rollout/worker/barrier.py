"""A turn barrier: all trajectories of a batch take their turn together. For deterministic runs, and as the
baseline of the benchmark."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from services.rollout.engines.base import GenerateCall, Generation, Waiting, generate_together

if TYPE_CHECKING:
    from services.rollout.engines.base import Engine


class TurnBarrier:
    """Holds the calls of `size` trajectories until each has made its own or has left, then makes them as one
    batch, in order."""

    def __init__(self, engine: Engine, size: int):
        self._engine = engine
        self._active = size
        self._waiting: dict[int, Waiting] = {}
        self._turn: asyncio.Task | None = None

    def member(self, index: int) -> BarrierMember:
        """The engine as trajectory `index` of the batch sees it."""
        return BarrierMember(self, index)

    def leave(self, index: int) -> None:
        """Trajectory `index` is finished, or has failed: nobody waits for it any more."""
        self._active -= 1
        self._take_turn()

    async def join(self, index: int, call: GenerateCall) -> Generation:
        done: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._waiting[index] = (call, done)
        self._take_turn()
        return await done

    def _take_turn(self) -> None:
        if self._waiting and len(self._waiting) == self._active:
            # By index, not in the order in which they came: that would change the batch, and with it the last
            # bits.
            batch = [self._waiting[i] for i in sorted(self._waiting)]
            self._waiting = {}
            self._turn = asyncio.create_task(generate_together(self._engine.generate_batch, batch))


class BarrierMember:
    """The Sampler of one trajectory."""

    def __init__(self, barrier: TurnBarrier, index: int):
        self._barrier = barrier
        self._index = index

    async def generate(self, call: GenerateCall) -> Generation:
        return await self._barrier.join(self._index, call)
