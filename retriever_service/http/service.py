"""What the server does, apart from HTTP: hold the index, search through cache and batcher, write answers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import orjson
from pydantic import TypeAdapter

from retriever_service.errors import QueueFull, RequestRefused
from retriever_service.http.batcher import Batcher, Q, R
from retriever_service.http.calls import Calls
from retriever_service.http.forms.leniency import clamped, cleaned
from retriever_service.http.forms.schemas import GivenDocument, Reply, RerankRequest, parse_body
from retriever_service.http.metrics import Metrics
from retriever_service.index_folder.documents import encode_document
from retriever_service.ranking import Order
from retriever_service.search.search_index import ChangingIndex, Hits, PartHits, SearchIndex
from retriever_service.search.users_index import UsersIndex
from retriever_service.settings import ServerSettings

log = logging.getLogger("retriever_service")
_ENCODED_AT_ONCE = 2000
"""Passages of an answer that are written before others have their turn: some milliseconds."""
_RERANK = TypeAdapter(RerankRequest)
_Given = tuple[str, tuple[str, ...]]
"""A query and the passages to order by it; hashable, since equal ones of a batch are searched once."""
T = TypeVar("T")


class _Ask:
    """Work with the index that the thread of searches does; its length is its places in a batch."""

    def __init__(self, work: Callable[[SearchIndex], Any], places: int) -> None:
        self.work = work
        self._places = max(1, places)

    def __len__(self) -> int:
        return self._places

    def done_with(self, index: SearchIndex) -> Any:
        """What the work returns, or its refusal of the request, so that those which share its batch need not
        be done again."""
        try:
            return self.work(index)
        except RequestRefused as refusal:
            return refusal


class _Opened:
    """An open index and the queues before it."""

    def __init__(
        self,
        index: SearchIndex,
        make: Callable[..., Batcher[Any, Any]],
        settings: ServerSettings,
        metrics: Metrics,
    ) -> None:
        self.index = index
        depth = settings.rerank_depth
        # An index of a user's own may lack what is optional.
        reranker = getattr(index, "reranker", None)
        self.rerankings: Batcher[_Given, Order] | None = None
        self.searches: Batcher[str, Hits] | Calls
        if isinstance(index, UsersIndex):
            self.searches = Calls(index, metrics, settings.max_queued)
        elif reranker is None:
            self.searches = make(index.search, index.quick)
        else:  # it takes longer by the passage: a batch of 256 queries would outlast the deadline of each
            self.searches = make(index.search, index.quick, lambda query, topk: max(topk, depth))
            self.rerankings = make(reranker.order, False, lambda given, topk: max(1, len(given[1])))
        self.asks: Batcher[_Ask, Any] = make(
            lambda asks, topk: [ask.done_with(index) for ask in asks], False, lambda ask, topk: len(ask)
        )

    @property
    def _queues(self) -> list[Batcher[Any, Any] | Calls]:
        return [queue for queue in (self.searches, self.rerankings, self.asks) if queue is not None]

    @property
    def running(self) -> bool:
        """Whether a search of this index runs."""
        return any(queue.running for queue in self._queues)

    async def stop(self, timeout_seconds: float) -> bool:
        """Answer what is queued, and refuse what comes then. False if a search still runs after that time."""
        until = time.monotonic() + timeout_seconds
        return all([await queue.stop(until - time.monotonic()) for queue in self._queues])


class Service:
    """The index of one application; `index` is None until it is loaded."""

    def __init__(self, settings: ServerSettings, open_index: Callable[[], SearchIndex]) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self._open = open_index
        self._opened: _Opened | None = None
        self._retired: list[_Opened] = []
        self._retiring: set[asyncio.Task[None]] = set()
        self._reloading = asyncio.Lock()
        self.what = ""
        """What the index is, in a few words, for those who ask while it loads."""
        self.waits: Callable[[], str] = lambda: self._waits
        """What the loading waits for, in one line; empty where it just takes its time."""
        self.on_wait: Callable[[str], None] = lambda line: None
        """Told the same whenever it changes, in the thread that loads."""
        self._waits = ""
        self._opening = False
        """Whether another index is being opened beside the one that is searched."""
        self.failure: Exception | None = None
        self.reload_failure: Exception | None = None
        """Why the index was not opened anew, if it was not at the last try."""
        self.left_running = False
        """Whether `stop` left the owner thread at work, which the interpreter would wait for at its end."""
        self._owner = ThreadPoolExecutor(1, "index-owner")
        self._opener = ThreadPoolExecutor(1, "index-opener")
        self._cache = ResultCache(settings.cache_size)

    @property
    def index(self) -> SearchIndex | None:
        """The index that is searched."""
        return None if self._opened is None else self._opened.index

    def tell(self, line: str) -> None:
        """What the loading waits for, from whichever thread loads."""
        if line != self._waits:
            self._waits = line
            self.on_wait(line)

    @property
    def loading(self) -> str:
        """What is loading, and what it waits for, in one line; empty once it is loaded."""
        if self.index is not None:
            return ""
        return "; ".join(part for part in (self.what, self.waits()) if part) or self.settings.index

    async def load(self) -> None:
        """Open the index, in the thread that will own it. What goes wrong is kept in `failure`."""
        try:
            self._take(await asyncio.get_running_loop().run_in_executor(self._owner, self._open))
        except Exception as error:
            self.failure = error

    async def reload(self) -> SearchIndex:
        """Open the index anew beside the one that is searched, and search the new one from then on. Requests
        that are in the queue are answered by the old one, which is closed when none can need it any more.

        Raises QueueFull while the first one is loading, and what is wrong with the new one; the old one stays
        then.
        """
        self.loaded()
        async with self._reloading:
            try:
                new = await asyncio.get_running_loop().run_in_executor(self._opener, self._open_another)
            except Exception as error:
                self.metrics.reloads.labels("failed").inc()
                self.metrics.reload_failing.set(1)
                self.reload_failure = error
                raise
            old = self._opened
            self._take(new)
            self._cache = ResultCache(self.settings.cache_size)
            self.metrics.reloads.labels("done").inc()
            self.metrics.reload_failing.set(0)
            self.reload_failure = None
            if old is not None:
                self._retired.append(old)
                if not await old.stop(self.settings.request_timeout_seconds):
                    log.warning("a search of the index before still runs, which is open until it ends")
                task = asyncio.get_running_loop().create_task(self._give_back(old))
                self._retiring.add(task)
                task.add_done_callback(self._retiring.discard)
            return new

    async def _give_back(self, old: _Opened) -> None:
        """Close an index that another one has replaced when nothing can need it any more. What is mapped is
        never taken from under a search that runs."""
        seconds = self.settings.request_timeout_seconds
        while not await old.stop(seconds):
            await asyncio.sleep(0)
        await asyncio.sleep(seconds)  # a request may read its rows still, for as long as a request may take
        self._retired.remove(old)
        old.index.close()

    def _open_another(self) -> SearchIndex:
        self._opening = True
        try:
            return self._open()
        finally:
            self._opening = False

    def _take(self, index: SearchIndex) -> None:
        self._opened = _Opened(index, self._batcher, self.settings, self.metrics)
        if isinstance(index, ChangingIndex):
            index.on_change = lambda: self._describe(index)
        self._describe(index)

    def _describe(self, index: SearchIndex) -> None:
        """Show what an index holds, unless it is no longer the one that is searched. From any thread."""
        if self.index is index:
            self.metrics.passages.set(index.info.passages)

    async def stop(self) -> None:
        """Answer what is queued, then close the index."""
        done = self._opened is None or await self._opened.stop(self.settings.drain_seconds)
        self._owner.shutdown(wait=False, cancel_futures=True)
        self._opener.shutdown(wait=False, cancel_futures=True)
        loading = self.index is None and self.failure is None
        for task in self._retiring:
            task.cancel()
        ended = [one for one in self._retired if not one.running]
        self.left_running = loading or not done or self._opening or len(ended) < len(self._retired)
        for retired in ended:
            retired.index.close()
        self._retired.clear()
        if self.index is not None and done:
            self.index.close()

    def _batcher(
        self,
        search: Callable[[list[Q], int], list[R]],
        quick: bool,
        weight: Callable[[Q, int], int] | None = None,
    ) -> Batcher[Q, R]:
        settings = self.settings
        return Batcher(
            search, self.metrics, self._owner, quick=quick, batch_size=settings.batch_size,
            batch_wait_ms=settings.batch_wait_ms, max_queued=settings.max_queued, weight=weight,
        )  # fmt: skip

    def loaded(self) -> SearchIndex:
        """The index. Raises QueueFull while it is loading."""
        if self.index is None:
            raise QueueFull("the index is still loading")
        return self.index

    async def rerank(self, body: bytes, timeout_seconds: float) -> Reply:
        """`POST /rerank`: from the body of the request to the body of the answer."""
        changed: list[str] = []
        settings = self.settings
        if self._opened is None:
            raise QueueFull("the index is still loading")
        if self._opened.rerankings is None:
            raise RequestRefused(404, "no reranker is configured: start the server with --reranker MODEL")
        asked = parse_body(_RERANK, body)
        if len(asked.queries) > settings.max_queries:
            counts = f"{len(asked.queries)} given, at most {settings.max_queries} are accepted"
            raise RequestRefused(422, f"queries: {counts}", "queries", settings.max_queries)
        queries = cleaned(asked.queries, "queries", settings.max_query_chars, changed)
        if len(asked.documents) != len(asked.queries):
            counts = f"{len(asked.documents)} lists for {len(asked.queries)} queries"
            raise RequestRefused(
                422,
                f"documents: {counts}, one list for each query is expected",
                "documents",
                len(asked.queries),
            )
        documents = [
            self._plain(one, f"documents[{i}]", settings.max_topk) for i, one in enumerate(asked.documents)
        ]
        topk = clamped(asked.rerank_topk or settings.topk, settings.max_topk, "rerank_topk", changed)
        items = [
            (q, tuple(contents for _, contents in one)) for q, one in zip(queries, documents, strict=True)
        ]
        rerankings = self._opened.rerankings
        orders = await rerankings.submit(items, topk, timeout_seconds) if items else []
        hits = [
            [(encode_document(*one[i]), score) for i, score in order]
            for one, order in zip(documents, orders, strict=True)
        ]
        return Reply(await encode_answer(hits, asked.return_scores), changed)

    @staticmethod
    def _plain(given: list[GivenDocument], field: str, limit: int) -> list[tuple[str, str]]:
        """Id and contents of each given passage. Raises RequestRefused."""
        if len(given) > limit:
            counts = f"{len(given)} given, at most {limit} are accepted"
            raise RequestRefused(422, f"{field}: {counts}", field, limit)
        found = []
        for i, document in enumerate(given):
            plain = document.plain()
            if plain is None:
                place = f"{field}[{i}]"
                expected = "an object with contents, or with document"
                raise RequestRefused(422, f"{place}: no contents", place, expected)
            found.append(plain)
        return found

    async def with_index(self, work: Callable[[SearchIndex], T], places: int, timeout_seconds: float) -> T:
        """What `work` returns, called with the index in the thread of searches. `places` of a batch are its.

        Raises QueueFull while the index is loading, UnspiralError (504) after `timeout_seconds`, and what
        `work` raises.
        """
        if self._opened is None:
            raise QueueFull("the index is still loading")
        (found,) = await self._opened.asks.submit([_Ask(work, places)], 0, timeout_seconds)
        if isinstance(found, RequestRefused):
            raise found
        return found

    async def search(self, queries: list[str], topk: int, timeout_seconds: float) -> list[Hits]:
        """Hits of each query; a blank one has none."""
        if self._opened is None:
            raise QueueFull("the index is still loading")
        opened = self._opened
        cache = self._cache
        hits: list[Hits] = [[] for _ in queries]
        metrics = self.metrics
        missing = []
        keys = []
        for i, query in enumerate(queries):
            if not query or query.isspace():
                continue
            key = (opened.index.normalise(query), topk)
            kept = cache.get(key)
            if kept is not None:
                hits[i] = kept
            else:
                missing.append(i)
                keys.append(key)
        if missing:
            found = await opened.searches.submit([queries[i] for i in missing], topk, timeout_seconds)
            for i, key, one in zip(missing, keys, found, strict=True):
                hits[i] = one
                if isinstance(one, PartHits):
                    metrics.partial.inc()
                else:
                    cache.put(key, one)
        metrics.queries.inc(len(queries))
        if len(missing) < len(queries):
            metrics.cached.inc(len(queries) - len(missing))
        if empty := hits.count([]):
            metrics.empty.inc(empty)
        return hits


class ResultCache:
    """The last results, least recently used out first. The size is in queries; 0 keeps nothing."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._entries: OrderedDict[tuple[str, int], Hits] = OrderedDict()

    def get(self, key: tuple[str, int]) -> Hits | None:
        hits = self._entries.get(key)
        if hits is not None:
            self._entries.move_to_end(key)
        return hits

    def put(self, key: tuple[str, int], hits: Hits) -> None:
        if self._size:
            self._entries[key] = hits
            if len(self._entries) > self._size:
                self._entries.popitem(last=False)


async def encode_answer(hits: list[Hits], return_scores: bool) -> bytes:
    """The body of an answer, joined from documents that are JSON already. Others have their turn between the
    parts of a long one."""
    rows = []
    room = _ENCODED_AT_ONCE
    for one in hits:
        if return_scores:
            row = b",".join([b'{"document":%b,"score":%b}' % (d, orjson.dumps(s)) for d, s in one])
        else:
            row = b",".join([d for d, _ in one])
        rows.append(b"[%b]" % row)
        room -= len(one)
        if room < 0:
            room = _ENCODED_AT_ONCE
            await asyncio.sleep(0)
    return b'{"result":[%b]}' % b",".join(rows)
