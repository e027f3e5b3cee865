"""Workers that have one GPU together start their engines one after the other.

vLLM finds the size of its cache by the free memory of the whole GPU, before and after a try: what a neighbour
takes meanwhile it counts as its own, and where one frees memory it does not start.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.rollout.pool.member import Member

WAITS_FOR = "the engine of another worker on its GPU"


class Neighbours:
    """One place to start an engine in for each GPU. Workers without a GPU do not wait, nor do any where a GPU
    has one worker (`workers_per_gpu`)."""

    def __init__(self, workers_per_gpu: int) -> None:
        self._crowded = workers_per_gpu > 1
        self._places: defaultdict[tuple[str, str], asyncio.Lock] = defaultdict(asyncio.Lock)

    @asynccontextmanager
    async def one_at_a_time(self, member: Member, stages: dict[int, str]) -> AsyncIterator[None]:
        """Held while the engine of a worker starts, of which `info` says where it is; the limits of those
        before it bound the wait. stages: what the worker of each slot waits for."""
        if not (self._crowded and member.gpus):
            yield
            return
        place = self._places[member.info.node, member.info.gpu_ids]
        if place.locked():
            stages[member.slot] = WAITS_FOR
        async with place:
            yield
