"""The index behind a server: work that shares a batch, and an old index that a search still reads."""

from __future__ import annotations

import asyncio
import threading

import pytest

from retriever_service.errors import RequestRefused
from retriever_service.http.service import Service
from retriever_service.index_folder.description import IndexInfo
from retriever_service.settings import ServerSettings


class Searched:
    """An index whose searches last until `go_on` is set, and that tells when it is closed."""

    quick = False
    rows = None
    reranker = None

    def __init__(self, name: str):
        self.info = IndexInfo(backend="bm25", corpus=name, passages=1, settings={})
        self.begun, self.go_on, self.closed = threading.Event(), threading.Event(), threading.Event()

    def search(self, queries, topk):
        self.begun.set()
        assert self.go_on.wait(60) and not self.closed.is_set()
        return [[(self.info.corpus.encode(), 1.0)] for _ in queries]

    def normalise(self, query):
        return query

    def close(self):
        self.closed.set()


async def happens(what):
    async with asyncio.timeout(60):
        while not what():
            await asyncio.sleep(0.01)


def service_over(*indexes: Searched, **options) -> Service:
    given = iter(indexes)
    return Service(ServerSettings(index="none", **options), lambda: next(given))


async def reloaded_under_a_search():
    """The old index and the new one, their service, and a search of the old one that goes on."""
    old, new = Searched("old"), Searched("new")
    service = service_over(old, new, request_timeout_seconds=0.1)
    await service.load()
    asked = asyncio.create_task(service.search(["a"], 1, 60.0))
    await happens(old.begun.is_set)
    await service.reload()
    return old, new, service, asked


async def test_an_index_is_not_closed_under_a_search_that_outlives_its_deadline(caplog):
    old, new, service, asked = await reloaded_under_a_search()
    assert "still runs" in caplog.text and service.index is new
    async with asyncio.timeout(60):
        for _ in range(30):  # three times as long as a request may take
            await asyncio.sleep(0.01)
            assert not old.closed.is_set()
    old.go_on.set()
    assert await asked == [[(b"old", 1.0)]]
    await happens(old.closed.is_set)
    assert not new.closed.is_set()
    await service.stop()
    assert new.closed.is_set() and not service.left_running


async def test_a_stop_leaves_an_old_index_open_that_a_search_still_reads():
    old, new, service, asked = await reloaded_under_a_search()
    await service.stop()
    assert new.closed.is_set() and not old.closed.is_set()
    assert service.left_running  # so the command ends the process without it
    old.go_on.set()
    assert await asked == [[(b"old", 1.0)]]


async def test_work_that_is_refused_fails_alone_and_nothing_else_of_its_batch_is_done_again():
    index = Searched("one")
    service = service_over(index)
    await service.load()
    done = []

    def first(index):
        index.begun.set()
        assert index.go_on.wait(60)

    def other(index):
        done.append("other")
        raise RequestRefused(409, "version: another one", "version")

    def good(index):
        done.append("good")
        return index.info.corpus

    before = asyncio.create_task(service.with_index(first, 1, 60.0))  # the next ones gather behind it
    await happens(index.begun.is_set)
    asks = [asyncio.create_task(service.with_index(work, 1, 60.0)) for work in (good, other, good)]
    await happens(lambda: service.metrics.queued._value.get() == 4)
    index.go_on.set()
    await before
    found = await asyncio.gather(*asks, return_exceptions=True)
    assert (found[0], found[2]) == ("one", "one")
    assert isinstance(found[1], RequestRefused) and found[1].status == 409
    assert done == ["good", "other", "good"]
    with pytest.raises(RequestRefused):
        await service.with_index(other, 1, 60.0)
    await service.stop()
