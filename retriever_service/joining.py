"""Searches that begin at about the same time go as one request.

A request costs its client milliseconds of processor time, whatever it asks. A joint one takes nothing from
its searches: where it fails, is refused, cannot be read, or is still without an answer after a part of the
time, each of them is asked alone, as if there had been no joint one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable

from retriever_service.answer import Answer, Hit

log = logging.getLogger("retriever_service")
MOST_JOINED = 32
"""Queries of one request."""
MOST_CHARS = 32_768
"""Their length together: a few long queries go as many requests."""
SHARE = 0.25
"""Of the time that is left to the search with the least: the longest wait for a joint answer, where it is
shorter than WAIT_SECONDS."""
WAIT_SECONDS = 0.25
"""Longest wait for a joint answer: a query that takes long must not hold up those beside it."""
GOOD_FIRST = 64
"""Searches that must have been answered well, one after the other, before any are joined. Twice as many after
each joint request that failed."""
MOST_GOOD_FIRST = 4096

Post = Callable[[list[str], int, float], Awaitable[Answer]]
"""One request: queries, topk, and the seconds that it may take."""


class _Joint:
    """Searches that wait for the same request."""

    def __init__(self) -> None:
        self.queries: list[str] = []
        self.ends: list[float] = []
        """When the time of each is up (monotonic)."""
        self.waiting: list[asyncio.Future[list[Hit] | None]] = []
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None


class Joiner:
    """Gathers searches for `seconds`, and sends them by `post`. For one event loop."""

    def __init__(self, post: Post, seconds: float) -> None:
        self._post = post
        self._seconds = seconds
        self._gathering: dict[int, _Joint] = {}
        """By topk."""
        self._sent: dict[asyncio.Task[None], _Joint] = {}
        self._closed = False
        self._good = 0
        self._good_first = GOOD_FIRST

    def note_good(self) -> None:
        """A search that was asked alone was answered."""
        self._good += 1

    def note_bad(self) -> None:
        """A try of a search that was asked alone failed."""
        self._good = 0

    async def ask(self, query: str, topk: int, left: float) -> list[Hit] | None:
        """The hits of one query, out of a joint answer; None where it is to be asked alone."""
        if self._closed or self._good < self._good_first or not self._seconds:
            return None
        loop = asyncio.get_running_loop()
        joint = self._gathering.get(topk)
        if joint is not None and sum(map(len, joint.queries)) + len(query) > MOST_CHARS:
            self._send(joint, topk)
            joint = None
        if joint is None:
            joint = self._gathering[topk] = _Joint()
            joint.timer = loop.call_later(self._seconds, self._send, joint, topk)
        future: asyncio.Future[list[Hit] | None] = loop.create_future()
        joint.queries.append(query)
        joint.ends.append(time.monotonic() + left)
        joint.waiting.append(future)
        if len(joint.queries) >= MOST_JOINED:
            self._send(joint, topk)
        try:
            return await future
        finally:
            if joint.task is not None and all(f.done() for f in joint.waiting):
                joint.task.cancel()  # nobody waits for it any more

    async def aclose(self) -> None:
        """End the requests that run, and join none any more. Each search that waits is to be asked alone."""
        self._closed = True
        gathering = [*self._gathering.values()]
        self._gathering.clear()
        for joint in gathering:
            if joint.timer is not None:
                joint.timer.cancel()
        sent = {**self._sent}
        for task in sent:
            task.cancel()
        # Also for a task that has not begun, of which no line will run.
        for future in (future for joint in (*gathering, *sent.values()) for future in joint.waiting):
            _give(future, None)
        for task in sent:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def _send(self, joint: _Joint, topk: int) -> None:
        if joint.task is not None:
            return
        if self._gathering.get(topk) is joint:
            del self._gathering[topk]
        if joint.timer is not None:
            joint.timer.cancel()
        # Alone after all: it is asked as it would have been, with all its time and tries.
        if len(joint.queries) == 1:
            _give(joint.waiting[0], None)
            return
        joint.task = asyncio.get_running_loop().create_task(self._asked(joint, topk))
        self._sent[joint.task] = joint
        joint.task.add_done_callback(self._sent.pop)

    async def _asked(self, joint: _Joint, topk: int) -> None:
        lists: list[list[Hit] | None] = [None] * len(joint.queries)
        try:
            left = min(joint.ends) - time.monotonic()
            answer = await self._post(joint.queries, topk, min(SHARE * left, WAIT_SECONDS))
            lists = answer.lists
            self._learn(answer.fault)
        except Exception as error:  # whatever it is: each search meets it alone, and says so there
            self._learn(str(error))
        finally:
            for hits, future in zip(lists, joint.waiting, strict=True):
                _give(future, hits)

    def _learn(self, fault: str | None) -> None:
        if fault is None:
            self._good_first = GOOD_FIRST
            return
        log.info("a request of several queries failed, and each is asked alone: %s", fault)
        self._good = 0
        self._good_first = min(2 * self._good_first, MOST_GOOD_FIRST)


def _give(future: asyncio.Future[list[Hit] | None], hits: list[Hit] | None) -> None:
    if not future.done():
        future.set_result(hits)
