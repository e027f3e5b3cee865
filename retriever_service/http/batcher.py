"""Micro-batching: requests of all clients meet in one queue, and one owner searches them together.

        event loop                                          owner thread
   submit(queries, topk) --> bounded queue --> batch --> search(queries, topk)
         future         <------- call_soon_threadsafe <---------'

At any time at most one search runs, and nothing else touches the index, so indexes that are not thread-safe
are safe. While a batch is searched the next one gathers. A long request is cut into batches and goes to the
end of the queue after each, so that short ones do not wait for all of it. A search that is cheaper than the
way to another thread and back is done on the spot (`quick`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from retriever_service.errors import DeadlinePassed
from retriever_service.http.metrics import Metrics
from retriever_service.http.waiting import Waiting, log_failure

Q = TypeVar("Q", bound=Sized)
"""A query: anything hashable that has a length."""
R = TypeVar("R")
"""The result of one query."""
_ON_THE_SPOT_SECONDS = 0.001
"""Longest search in the event loop, by the mean of earlier queries..."""
_ON_THE_SPOT_CHARS = 1024
"""... and its longest text: the mean says nothing of a text as long as fifty of them."""


class _Job(Generic[Q, R]):
    """One request in the queue."""

    __slots__ = ("error", "expires", "future", "queries", "results", "topk")

    def __init__(self, queries: list[Q], topk: int, future: asyncio.Future[list[R]], expires: float) -> None:
        self.queries = queries
        self.topk = topk
        self.future = future
        self.expires = expires
        self.results: list[R] = []
        self.error: Exception | None = None


_Part = tuple[_Job[Q, R], list[Q]]
"""A job, and those of its queries that a batch has taken."""


class Batcher(Waiting, Generic[Q, R]):
    """The queue before one `search`. All of it but the search itself happens in one event loop."""

    def __init__(
        self,
        search: Callable[[list[Q], int], list[R]],
        metrics: Metrics,
        owner: ThreadPoolExecutor,
        *,
        batch_size: int,
        batch_wait_ms: float,
        max_queued: int,
        quick: bool = False,
        weight: Callable[[Q, int], int] | None = None,
    ) -> None:
        """`search` gets queries and topk, and returns one result per query. `weight` gives the number of the
        `batch_size` places that a query with its topk takes; None is one per query."""
        super().__init__(metrics, max_queued)
        self._search = search
        self._quick = quick
        self._weight = weight
        self._batch_size = batch_size
        self._wait_seconds = batch_wait_ms / 1000
        self._owner = owner
        self._jobs: deque[_Job[Q, R]] = deque()
        self._running = False
        self._scheduled: asyncio.Handle | None = None
        self._gathering = False
        """Whether the scheduled start is a wait for the batch to fill, which a full batch cuts short."""

    @property
    def running(self) -> bool:
        return self._running

    def _has_waiting(self) -> bool:
        return bool(self._jobs)

    async def submit(self, queries: list[Q], topk: int, timeout_seconds: float) -> list[R]:
        """The result of each query. Raises QueueFull (also when stopping), UnspiralError (504), or
        what the search raised."""
        n = len(queries)
        self._refuse_at_the_end()
        # Not `queued`: it forgets a request whose deadline has passed, and the owner may be searching for it
        # still.
        quick = (
            self._quick
            and (self._seconds_per_query or 1) * n < _ON_THE_SPOT_SECONDS
            and not self._running
            and not self._jobs
        )
        if quick and sum(map(len, queries)) < _ON_THE_SPOT_CHARS:
            return self._timed_search(queries, topk)
        self._refuse_beyond(n)
        loop = asyncio.get_running_loop()
        job: _Job[Q, R] = _Job(queries, topk, loop.create_future(), time.monotonic() + timeout_seconds)
        self._jobs.append(job)
        with self._counted(n):
            self._schedule(loop)
            try:
                async with asyncio.timeout(timeout_seconds):
                    return await job.future
            except (TimeoutError, asyncio.CancelledError) as error:
                with contextlib.suppress(ValueError):  # it may be in the batch that is searched
                    self._jobs.remove(job)
                if isinstance(error, asyncio.CancelledError):
                    raise
                raise DeadlinePassed(
                    f"no answer within {timeout_seconds:.3g} s; {self.queued} queries are queued"
                ) from None

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start a batch after this turn of the event loop, whose other callbacks may bring more queries; or
        after the time to gather."""
        if self._running or (self._scheduled is not None and not self._gathering):
            return
        gathers = bool(self._wait_seconds) and not self._full()
        if self._scheduled is not None and gathers:
            return
        if self._scheduled is not None:  # the batch is full: no reason to wait longer
            self._scheduled.cancel()
        self._gathering = gathers
        self._scheduled = (
            loop.call_later(self._wait_seconds, self._start, loop)
            if gathers
            else loop.call_soon(self._start, loop)
        )

    def _full(self) -> bool:
        """Whether what is queued fills a batch."""
        if self._weight is None or self.queued >= self._batch_size:
            return self.queued >= self._batch_size
        places = sum(
            self._weight(query, job.topk) for job in self._jobs for query in job.queries[len(job.results) :]
        )
        return places >= self._batch_size

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._scheduled = None
        parts, topk = self._take()
        if not parts:
            return
        self._running = True
        done = self._owner.submit(self._search_parts, parts, topk)

        def finished(_: Future[None]) -> None:
            # The loop may be closed: the server stopped without waiting for this search.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._finish, loop, parts, done)

        done.add_done_callback(finished)

    def _take(self) -> tuple[list[_Part[Q, R]], int]:
        """One batch: queries with the same topk from the jobs at the head of the queue, with their jobs."""
        parts: list[_Part[Q, R]] = []
        others: list[_Job[Q, R]] = []
        room = self._batch_size
        topk = 0
        now = time.monotonic()
        while self._jobs and room > 0:
            job = self._jobs.popleft()
            if job.future.done() or job.expires < now:
                continue
            if parts and job.topk != topk:
                others.append(job)
                continue
            topk = job.topk
            count, taken = self._fitting(job, room)
            if parts and taken > room:
                others.append(job)
                break
            parts.append((job, job.queries[len(job.results) : len(job.results) + count]))
            room -= taken
        # Jobs with another topk keep their place at the head: they are the next batch.
        self._jobs.extendleft(reversed(others))
        return parts, topk

    def _fitting(self, job: _Job[Q, R], room: int) -> tuple[int, int]:
        """How many of the queries that a job still has come into a batch, one at least, and how many places
        they take."""
        begin = len(job.results)
        end = len(job.queries)
        if self._weight is None:
            count = min(end - begin, room)
            return count, count
        taken = self._weight(job.queries[begin], job.topk)
        at = begin + 1
        while at < end and taken + (more := self._weight(job.queries[at], job.topk)) <= room:
            taken += more
            at += 1
        return at - begin, taken

    def _finish(self, loop: asyncio.AbstractEventLoop, parts: list[_Part[Q, R]], done: Future[None]) -> None:
        self._running = False
        for job, _ in parts:
            if job.future.done():
                continue
            if (error := job.error or done.exception()) is not None:
                job.future.set_exception(error)
            elif len(job.results) == len(job.queries):
                job.future.set_result(job.results)
            else:  # a long request: to the end of the queue, so that short ones do not wait for all of it
                self._jobs.append(job)
        if self._jobs:
            self._start(loop)

    def _search_parts(self, parts: list[_Part[Q, R]], topk: int) -> None:
        """Search the parts together; if that fails, each alone, so that one bad query fails its own request
        only."""
        # A query that several requests have in common is searched once.
        queries = list(dict.fromkeys(q for _, part in parts for q in part))
        try:
            results = dict(zip(queries, self._timed_search(queries, topk), strict=True))
        except Exception as error:
            if len(parts) == 1:
                log_failure(error)
                parts[0][0].error = error
                return
            for one in parts:
                self._search_parts([one], topk)
            return
        for job, part in parts:
            job.results += [results[q] for q in part]

    def _timed_search(self, queries: list[Q], topk: int) -> list[R]:
        started = time.perf_counter()
        results = self._search(queries, topk)
        self._took(time.perf_counter() - started, len(queries))
        return results
