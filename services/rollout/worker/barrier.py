"""A turn barrier: all trajectories of a batch take their turn together. For deterministic runs, and as the
baseline of the benchmark."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from services.rollout.engines.base import GenerateCall, Generation

if TYPE_CHECKING:
    from services.rollout.engines.base import Engine


class TurnBarrier:
    """Holds the calls of `size` trajectories until each has made its own or has left, then makes them as one
    batch, in order."""

    def __init__(self, engine: Engine, size: int):
        self._engine, self._active = engine, size
        self._waiting: dict[int, tuple[GenerateCall, asyncio.Future]] = {}
        self._turn: asyncio.Task | None = None

    def member(self, index: int) -> BarrierMember:
        """The engine as trajectory `index` of the batch sees it."""
        return BarrierMember(self, index)

    def leave(self, index: int) -> None:
        """Trajectory `index` is finished, or has failed: nobody waits for it any more."""
        self._active -= 1
        self._take_turn()

    async def join(self, index: int, call: GenerateCall) -> Generation:
        done = asyncio.get_running_loop().create_future()
        self._waiting[index] = (call, done)
        self._take_turn()
        return await done

    def _take_turn(self) -> None:
        if self._waiting and len(self._waiting) == self._active:
            batch, self._waiting = [self._waiting[i] for i in sorted(self._waiting)], {}
            self._turn = asyncio.create_task(self._generate(batch))

    async def _generate(self, batch: list[tuple[GenerateCall, asyncio.Future]]) -> None:
        try:
            results = await self._engine.generate_batch([call for call, _ in batch])
        except Exception as e:
            for _, done in batch:
                if not done.done():
                    done.set_exception(e)
        else:
            for (_, done), result in zip(batch, results, strict=True):
                if not done.done():
                    done.set_result(result)


class BarrierMember:
    """What one trajectory generates with."""

    def __init__(self, barrier: TurnBarrier, index: int):
        self._barrier, self._index = barrier, index

    async def generate(self, request_id, token_ids, *, max_tokens, temperature, seed, stop) -> Generation:
        return await self._barrier.join(
            self._index, GenerateCall(request_id, token_ids, max_tokens, temperature, seed, stop)
        )
