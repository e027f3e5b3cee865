"""Calls of a function that is the index: those of all requests wait in one queue, so many at a time.

Unlike the batches of `batcher.py` no call waits for another to return: one that is slow, or that hangs, holds
its own place and no answer but its own. Requests take turns, so that a short one does not wait for all of a
long one; what several ask for at the same time is called once.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import time
from concurrent.futures import Future
from functools import partial

from retriever_service.errors import DeadlinePassed
from retriever_service.http.metrics import Metrics
from retriever_service.http.waiting import Waiting, log_failure
from retriever_service.search.search_index import Hits
from retriever_service.search.users_index import UsersIndex


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


class Calls(Waiting):
    """The queue before a function. All of it but the calls themselves happens in one event loop."""

    def __init__(self, index: UsersIndex, metrics: Metrics, max_queued: int) -> None:
        super().__init__(metrics, max_queued)
        self._index = index
        self._calls: dict[tuple[str, int], _Call] = {}
        """Queued or being made, and waited for."""
        self._queue: list[tuple[int, int, _Call]] = []
        """A heap: by the turn, then as they came."""
        self._turn = 0
        """Of the last call that began. The first query of a request has the next one, its second one more."""
        self._came = 0
        self._in_hand = 0
        """Calls that hold a place."""

    @property
    def running(self) -> bool:
        return self._in_hand > 0

    def _has_waiting(self) -> bool:
        return self.queued > 0

    async def submit(self, queries: list[str], topk: int, timeout_seconds: float) -> list[Hits]:
        """The result of each query. Raises QueueFull (also when stopping), UnspiralError (504), or what the
        first call that failed raised."""
        self._refuse_at_the_end()
        self._refuse_beyond(len(queries), self._index.at_once)
        joined = [self._joined(query, topk, self._turn + 1 + i) for i, query in enumerate(queries)]
        with self._counted(len(queries)):
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
                for call in joined:
                    self._left(call)

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
            self._took(time.perf_counter() - call.began)
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
        log_failure(error)
        call.answer.set_exception(error)
        call.answer.exception()  # asyncio is not to complain where nobody waits any more

    def _give_place(self, call: _Call) -> None:
        if call.holds_place:
            call.holds_place = False
            self._in_hand -= 1
            self._start()
