"""Calls of a function that is the index: those of all requests wait in one queue, so many at a time.

Unlike the batches of `batcher.py` no call waits for another to return: one that is slow, or that hangs, holds
its own place and no answer but its own. Requests take turns, so that a short one does not wait for all of a
long one; what several ask for at the same time is called once.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import math
import time
from concurrent.futures import Future
from functools import partial
from typing import Protocol

from retriever_service.errors import DeadlinePassed, QueueFull
from retriever_service.http.metrics import Metrics
from retriever_service.search.search_index import Hits
from services.common.errors import UnspiralError, UserError

log = logging.getLogger("retriever_service")


class Called(Protocol):
    """An index that is a function."""

    at_once: int
    """Most calls at a time."""
    seconds: float
    """Longest wait for one."""

    def begin(self, query: str, topk: int) -> Future[Hits]:
        """Call it in a thread."""

    def give_up(self, call: Future[Hits]) -> tuple[UserError, bool]:
        """The error of a call that is late, and whether another thread takes the place of its own."""


class _Call:
    """One call, for all who wait for it."""

    def __init__(self, query: str, topk: int, answer: asyncio.Future[Hits]) -> None:
        self.query = query
        self.topk = topk
        self.answer = answer
        self.waiting = 0
        """Requests that wait for it."""
        self.began = 0.0
        """time.perf_counter(); 0 while it is queued."""
        self.holds_place = False


class Calls:
    """The queue before a function. All of it but the calls themselves happens in one event loop."""

    def __init__(self, index: Called, metrics: Metrics, max_queued: int) -> None:
        self._index = index
        self._metrics = metrics
        self._max_queued = max_queued
        self._calls: dict[tuple[str, int], _Call] = {}
        """Queued or being made, and waited for."""
        self._queue: list[tuple[int, int, _Call]] = []
        """A heap: by the turn, then as they came."""
        self._turn = 0
        """Of the last call that began. The first query of a request has the next one, its second one more."""
        self._came = 0
        self._in_hand = 0
        """Calls that hold a place."""
        self._seconds_per_call: float | None = None
        self._stopping = False
        self.queued = 0
        """Queries that wait or are being searched."""

    @property
    def running(self) -> bool:
        """Whether a call runs."""
        return self._in_hand > 0

    async def submit(self, queries: list[str], topk: int, timeout_seconds: float) -> list[Hits]:
        """The result of each query. Raises QueueFull (also when stopping), UnspiralError (504), or what the
        first call that failed raised."""
        n = len(queries)
        if self._stopping:
            raise QueueFull("the server is stopping")
        # With nothing queued any request is taken: one with more queries than the queue has places would be
        # refused for ever.
        if self.queued and self.queued + n > self._max_queued:
            self._metrics.refused.inc()
            each = (self._seconds_per_call or 0) / self._index.at_once
            wait = min(60, max(1, math.ceil(self.queued * each)))
            raise QueueFull(f"{self.queued} queries are waiting, at most {self._max_queued} may", wait)
        joined = [self._joined(query, topk, self._turn + 1 + i) for i, query in enumerate(queries)]
        self.queued += n
        self._metrics.queued.inc(n)
        self._start()
        try:
            await asyncio.wait(
                {call.answer for call in joined},
                timeout=timeout_seconds,
                return_when=asyncio.FIRST_EXCEPTION,
            )
            for call in joined:
                if call.answer.done():
                    call.answer.result()
            if not all(call.answer.done() for call in joined):
                raise DeadlinePassed(
                    f"no answer within {timeout_seconds:.3g} s; {self.queued} queries are queued"
                )
            return [call.answer.result() for call in joined]
        finally:
            self.queued -= n
            self._metrics.queued.dec(n)
            for call in joined:
                self._left(call)

    async def stop(self, timeout_seconds: float) -> bool:
        """Refuse new requests and wait for the queued ones; at most a second for calls whose clients have all
        given up. False if one still runs then."""
        self._stopping = True
        until = time.monotonic() + timeout_seconds
        while (self._in_hand or self.queued) and time.monotonic() < until:
            if not self.queued:
                until = min(until, time.monotonic() + 1.0)
            await asyncio.sleep(0.01)
        return not self._in_hand

    def _joined(self, query: str, topk: int, turn: int) -> _Call:
        """The call of a query: a new one, unless somebody waits for the same."""
        call = self._calls.get((query, topk))
        if call is None:
            call = _Call(query, topk, asyncio.get_running_loop().create_future())
            self._calls[query, topk] = call
            self._came += 1
            heapq.heappush(self._queue, (turn, self._came, call))
        call.waiting += 1
        return call

    def _left(self, call: _Call) -> None:
        """For a request that waits for it no longer. One that has not begun, and nobody wants, never will."""
        call.waiting -= 1
        if not call.waiting and not call.began:
            self._forget(call)

    def _forget(self, call: _Call) -> None:
        if self._calls.get((call.query, call.topk)) is call:
            del self._calls[call.query, call.topk]

    def _start(self) -> None:
        """Make the calls that have a place."""
        loop = asyncio.get_running_loop()
        while self._queue and self._in_hand < self._index.at_once:
            turn, _, call = heapq.heappop(self._queue)
            if not call.waiting:
                continue
            self._turn = turn
            self._in_hand += 1
            call.holds_place = True
            call.began = time.perf_counter()
            future = self._index.begin(call.query, call.topk)
            timer = loop.call_later(self._index.seconds, self._late, call, future)
            future.add_done_callback(partial(self._tell, loop, call, timer))

    def _tell(
        self, loop: asyncio.AbstractEventLoop, call: _Call, timer: asyncio.Handle, future: Future[Hits]
    ) -> None:
        # The loop may be closed: the server stopped without waiting for this call.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._returned, call, timer, future)

    def _returned(self, call: _Call, timer: asyncio.Handle, future: Future[Hits]) -> None:
        timer.cancel()
        if not call.answer.done():
            seconds = time.perf_counter() - call.began
            last = self._seconds_per_call
            self._seconds_per_call = seconds if last is None else 0.9 * last + 0.1 * seconds
            self._metrics.batch_size.observe(1)
            self._metrics.search.observe(seconds)
            if (error := future.exception()) is None:
                call.answer.set_result(future.result())
            else:
                self._failed(call, error)
        self._forget(call)
        self._give_place(call)

    def _late(self, call: _Call, future: Future[Hits]) -> None:
        if future.done():  # `_returned` is about to come
            return
        error, replaced = self._index.give_up(future)
        self._failed(call, DeadlinePassed(str(error)))
        self._forget(call)
        if replaced:
            self._give_place(call)

    def _failed(self, call: _Call, error: BaseException) -> None:
        known = isinstance(error, UnspiralError)  # its line says all
        log.error("search failed: %s", error, exc_info=None if known else error)
        call.answer.set_exception(error)
        call.answer.exception()  # asyncio is not to complain where nobody waits any more

    def _give_place(self, call: _Call) -> None:
        if call.holds_place:
            call.holds_place = False
            self._in_hand -= 1
            self._start()
