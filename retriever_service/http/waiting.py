"""What the queues before an index have in common: whom they refuse, what they measure, how they end."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from retriever_service.errors import QueueFull, RequestRefused
from retriever_service.http.metrics import Metrics
from services.common.errors import UnspiralError

log = logging.getLogger("retriever_service")


def log_failure(error: BaseException) -> None:
    """Of a search; a request that is wrong in itself is no failure."""
    if not isinstance(error, RequestRefused):
        known = isinstance(error, UnspiralError)  # its line says all
        log.error("search failed: %s", error, exc_info=None if known else error)


class Waiting(ABC):
    """Queries that wait or are being searched."""

    def __init__(self, metrics: Metrics, max_queued: int) -> None:
        self._metrics = metrics
        self._max_queued = max_queued
        self._stopping = False
        self._seconds_per_query: float | None = None
        """The mean, the newest counting most; None before the first search."""
        self.queued = 0
        """Queries that wait or are being searched."""

    @property
    @abstractmethod
    def running(self) -> bool:
        """Whether a search runs."""

    @abstractmethod
    def _has_waiting(self) -> bool:
        """Whether a request waits that no search has taken."""

    async def stop(self, timeout_seconds: float) -> bool:
        """Refuse new requests and wait for the queued ones; at most a second for a search whose clients have
        all given up. False if a search still runs then."""
        self._stopping = True
        until = time.monotonic() + timeout_seconds
        while (self.running or self._has_waiting()) and time.monotonic() < until:
            if not self.queued:
                until = min(until, time.monotonic() + 1.0)
            await asyncio.sleep(0.01)
        return not self.running

    def _refuse_at_the_end(self) -> None:
        """Raises QueueFull when stopping."""
        if self._stopping:
            raise QueueFull("the server is stopping")

    def _refuse_beyond(self, queries: int, at_once: int = 1) -> None:
        """Raises QueueFull where so many more have no place. at_once: of them that are searched at a time."""
        # With nothing queued any request is taken: one with more queries than the queue has places would be
        # refused for ever.
        if not self.queued or self.queued + queries <= self._max_queued:
            return
        self._metrics.refused.inc()
        each = (self._seconds_per_query or 0) / at_once
        wait = min(60, max(1, math.ceil(self.queued * each)))
        raise QueueFull(f"{self.queued} queries are waiting, at most {self._max_queued} may", wait)

    @contextmanager
    def _counted(self, queries: int) -> Iterator[None]:
        """Inside, a request's queries are queued."""
        self.queued += queries
        self._metrics.queued.inc(queries)
        try:
            yield
        finally:
            self.queued -= queries
            self._metrics.queued.dec(queries)

    def _took(self, seconds: float, queries: int = 1) -> None:
        """After a search of so many together."""
        each = seconds / queries
        last = self._seconds_per_query
        self._seconds_per_query = each if last is None else 0.9 * last + 0.1 * each
        self._metrics.batch_size.observe(queries)
        self._metrics.search.observe(seconds)
