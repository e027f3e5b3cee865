"""The times of a trajectory's generations and searches. As in `watching`, the agent loop knows nothing of
it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from services.contracts import Span

if TYPE_CHECKING:
    from retriever_service.client import Hit
    from services.rollout.engines.base import GenerateCall, Generation, Sampler
    from services.rollout.worker.loop import Search


class TimedSampler:
    """The engine of one trajectory, which notes each call as a span."""

    def __init__(self, engine: Sampler, spans: list[Span]) -> None:
        self._engine = engine
        self._spans = spans

    async def generate(self, call: GenerateCall) -> Generation:
        began = time.monotonic()
        generation = await self._engine.generate(call)
        self._spans.append(Span("generate", began, time.monotonic() - began))
        return generation


def timed_search(search: Search, spans: list[Span]) -> Search:
    """The search, which notes each call as a span."""

    async def timed(query: str) -> list[Hit]:
        began = time.monotonic()
        hits = await search(query)
        spans.append(Span("search", began, time.monotonic() - began))
        return hits

    return timed
