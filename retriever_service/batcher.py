"""Micro-batching: requests of all clients meet in one queue, and one thread owns the index and searches them together.

        event loop                                 owner thread
   submit(queries, topk) --> bounded queue --> take up to batch_size --> search(queries, topk)
         future         <-- call_soon_threadsafe(one call a batch) <-----------'

Nothing else ever touches the index, so indexes that are not thread-safe are safe. While a batch is searched the next one gathers;
a long request is cut into batches and goes to the end of the queue after each, so that short ones do not wait for all of it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from .errors import DeadlinePassed, QueueFull
from .metrics import Metrics

log = logging.getLogger("retriever_service")
Hits = list[tuple[bytes, float]]
Search = Callable[[list[str], int], list[Hits]]


class _Job:
    """One request in the queue."""

    __slots__ = ("error", "expires", "future", "loop", "queries", "results", "topk")

    def __init__(self, queries: list[str], topk: int, loop: asyncio.AbstractEventLoop, expires: float) -> None:
        self.queries, self.topk, self.loop, self.expires = queries, topk, loop, expires
        self.future: asyncio.Future[list[Hits]] = loop.create_future()
        self.results: list[Hits] = []
        self.error: BaseException | None = None

    @property
    def over(self) -> bool:
        return self.future.done() or self.error is not None or len(self.results) == len(self.queries)


class Batcher:
    """One owner thread over `search`. `submit` is called from an event loop; `stop` finishes what is queued."""

    def __init__(self, search: Search, metrics: Metrics, *, batch_size: int, batch_wait_ms: float, max_queued: int) -> None:
        self._search, self._metrics = search, metrics
        self._batch_size, self._wait, self._max_queued = batch_size, batch_wait_ms / 1000, max_queued
        self._inbox: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._waiting: deque[_Job] = deque()
        self._queued = 0
        self._seconds_per_query = 0.001
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="index-owner", daemon=True)
        self._thread.start()

    @property
    def queued(self) -> int:
        """Queries that wait or are being searched."""
        return self._queued

    async def submit(self, queries: list[str], topk: int, timeout_seconds: float) -> list[Hits]:
        """Hits of each query. Raises QueueFull (also when stopping), DeadlinePassed, or what the search raised."""
        n = len(queries)
        if self._stopping:
            raise QueueFull("the server is stopping")
        if self._queued and self._queued + n > self._max_queued:
            self._metrics.refused.inc()
            wait = min(60, max(1, math.ceil(self._queued * self._seconds_per_query)))
            raise QueueFull(f"{self._queued} queries are waiting, at most {self._max_queued} may", wait)
        job = _Job(queries, topk, asyncio.get_running_loop(), time.monotonic() + timeout_seconds)
        self._queued += n
        self._inbox.put(job)
        try:
            async with asyncio.timeout(timeout_seconds):
                return await job.future
        except TimeoutError:
            raise DeadlinePassed(f"no answer within {timeout_seconds:g} s; {self._queued} queries are queued") from None
        finally:
            self._queued -= n

    def stop(self, timeout_seconds: float) -> bool:
        """Refuse new requests, answer those that are queued, end the thread. False if it did not end in time."""
        self._stopping = True
        self._inbox.put(None)
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        stopping = False
        while True:
            if not self._waiting and not stopping:
                job = self._inbox.get()
                stopping = job is None
                if job:
                    self._waiting.append(job)
                    if self._wait:
                        stopping = self._gather()
            stopping = self._drain_inbox() or stopping
            if self._waiting:
                self._one_batch()
            elif stopping:
                return

    def _drain_inbox(self) -> bool:
        try:
            while True:
                job = self._inbox.get_nowait()
                if job is None:
                    return True
                self._waiting.append(job)
        except queue.Empty:
            return False

    def _gather(self) -> bool:
        """Wait for company until the batch is full or the time is up. True if the end was asked for."""
        until, size = time.monotonic() + self._wait, len(self._waiting[0].queries)
        while size < self._batch_size and (left := until - time.monotonic()) > 0:
            try:
                job = self._inbox.get(timeout=left)
            except queue.Empty:
                break
            if job is None:
                return True
            self._waiting.append(job)
            size += len(job.queries)
        return False

    def _one_batch(self) -> None:
        """Search one batch: queries with the same topk from the jobs at the head of the queue."""
        now, parts, room, others = time.monotonic(), [], self._batch_size, []
        topk = self._waiting[0].topk
        while self._waiting and room:
            job = self._waiting.popleft()
            if job.over or job.expires < now:
                continue
            if job.topk != topk:
                others.append(job)
                continue
            done = len(job.results)
            part = job.queries[done : done + room]
            parts.append((job, part))
            room -= len(part)
        self._waiting.extendleft(reversed(others))
        if not parts:
            return
        started = time.perf_counter()
        self._search_parts(parts, topk)
        size, seconds = self._batch_size - room, time.perf_counter() - started
        self._seconds_per_query += 0.1 * (seconds / size - self._seconds_per_query)
        self._metrics.batch_size.observe(size)
        self._metrics.search.observe(seconds)
        finished = []
        for job, _ in parts:
            if job.over:
                finished.append(job)
            else:
                self._waiting.append(job)
        loops = {job.loop for job in finished}
        for loop in loops:
            deliver([job for job in finished if job.loop is loop], loop)

    def _search_parts(self, parts: list[tuple[_Job, list[str]]], topk: int) -> None:
        """Search the parts together; if that fails, each alone, so that one bad query fails its own request only."""
        unique = {query: i for i, query in enumerate(dict.fromkeys(q for _, part in parts for q in part))}
        try:
            hits: list[Any] = self._search(list(unique), topk)
        except Exception as error:
            if len(parts) == 1:
                log.exception("search failed")
                parts[0][0].error = error
                return
            for part in parts:
                self._search_parts([part], topk)
            return
        for job, part in parts:
            job.results += [hits[unique[q]] for q in part]


def deliver(jobs: list[_Job], loop: asyncio.AbstractEventLoop) -> None:
    """Hand results to their event loop, in one call for all."""

    def settle() -> None:
        for job in jobs:
            if not job.future.done():
                if job.error is not None:
                    job.future.set_exception(job.error)
                else:
                    job.future.set_result(job.results)

    try:
        loop.call_soon_threadsafe(settle)
    except RuntimeError:
        log.warning("the event loop was closed before %d answers were handed over", len(jobs))
