"""What the server does, apart from HTTP: hold the index, search through cache and batcher, write answers."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import orjson
from pydantic import TypeAdapter

from retriever_service.errors import QueueFull
from retriever_service.http.batcher import Batcher, Q, R
from retriever_service.http.leniency import clamped, cleaned
from retriever_service.http.metrics import Metrics
from retriever_service.http.schemas import BadRequest, GivenDocument, Reply, RerankRequest, parse_body
from retriever_service.index_folder.documents import encode_document
from retriever_service.ranking import Order
from retriever_service.search.search_index import Hits, PartHits, SearchIndex
from retriever_service.settings import ServerSettings

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


class _Opened:
    """An open index and the queues before it."""

    def __init__(self, index: SearchIndex, make: Callable[..., Batcher[Any, Any]], depth: int) -> None:
        self.index = index
        # An index of a user's own may lack what is optional.
        reranker = getattr(index, "reranker", None)
        self.rerankings: Batcher[_Given, Order] | None = None
        if reranker is None:
            self.searches: Batcher[str, Hits] = make(index.search, index.quick)
        else:  # it takes longer by the passage: a batch of 256 queries would outlast the deadline of each
            self.searches = make(index.search, index.quick, lambda query, topk: max(topk, depth))
            self.rerankings = make(reranker.order, False, lambda given, topk: max(1, len(given[1])))
        self.asks: Batcher[_Ask, Any] = make(
            lambda asks, topk: [ask.work(index) for ask in asks], False, lambda ask, topk: len(ask)
        )

    async def stop(self, timeout_seconds: float) -> bool:
        """Answer what is queued, and refuse what comes then. False if a search still runs after that time."""
        until = time.monotonic() + timeout_seconds
        queues: list[Batcher[Any, Any] | None] = [self.searches, self.rerankings, self.asks]
        return all([await queue.stop(until - time.monotonic()) for queue in queues if queue is not None])


class Service:
    """The index of one application; `index` is None until it is loaded."""

    def __init__(self, settings: ServerSettings, open_index: Callable[[], SearchIndex]) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self._open = open_index
        self._opened: _Opened | None = None
        self._retired: list[SearchIndex] = []
        self._reloading = asyncio.Lock()
        self._opening = False
        """Whether another index is being opened beside the one that is searched."""
        self.failure: Exception | None = None
        self.left_running = False
        """Whether `stop` left the owner thread at work, which the interpreter would wait for at its end."""
        self._owner = ThreadPoolExecutor(1, "index-owner")
        self._opener = ThreadPoolExecutor(1, "index-opener")
        self._cache = ResultCache(settings.cache_size)

    @property
    def index(self) -> SearchIndex | None:
        """The index that is searched."""
        return None if self._opened is None else self._opened.index

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
            except Exception:
                self.metrics.reloads.labels("failed").inc()
                raise
            old = self._opened
            self._take(new)
            self._cache = ResultCache(self.settings.cache_size)
            self.metrics.reloads.labels("done").inc()
            if old is not None:
                await old.stop(self.settings.request_timeout_seconds)
                self._retired.append(old.index)
                # A request may read its rows still, for as long as a request may take.
                asyncio.get_running_loop().call_later(
                    self.settings.request_timeout_seconds, self._close_retired, old.index
                )
            return new

    def _open_another(self) -> SearchIndex:
        self._opening = True
        try:
            return self._open()
        finally:
            self._opening = False

    def _close_retired(self, index: SearchIndex) -> None:
        if any(one is index for one in self._retired):
            self._retired = [one for one in self._retired if one is not index]
            index.close()

    def _take(self, index: SearchIndex) -> None:
        self.metrics.passages.set(index.info.passages)
        self._opened = _Opened(index, self._batcher, self.settings.rerank_depth)

    async def stop(self) -> None:
        """Answer what is queued, then close the index."""
        done = self._opened is None or await self._opened.stop(self.settings.drain_seconds)
        self._owner.shutdown(wait=False, cancel_futures=True)
        self._opener.shutdown(wait=False, cancel_futures=True)
        loading = self.index is None and self.failure is None
        self.left_running = loading or not done or self._opening
        for retired in [*self._retired]:
            self._close_retired(retired)
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
            raise BadRequest(404, "no reranker is configured: start the server with --reranker MODEL")
        asked = parse_body(_RERANK, body)
        if len(asked.queries) > settings.max_queries:
            counts = f"{len(asked.queries)} given, at most {settings.max_queries} are accepted"
            raise BadRequest(422, f"queries: {counts}", "queries", settings.max_queries)
        queries = cleaned(asked.queries, "queries", settings.max_query_chars, changed)
        if len(asked.documents) != len(asked.queries):
            counts = f"{len(asked.documents)} lists for {len(asked.queries)} queries"
            raise BadRequest(
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
        """Id and contents of each given passage. Raises BadRequest."""
        if len(given) > limit:
            counts = f"{len(given)} given, at most {limit} are accepted"
            raise BadRequest(422, f"{field}: {counts}", field, limit)
        found = []
        for i, document in enumerate(given):
            plain = document.plain()
            if plain is None:
                place = f"{field}[{i}]"
                expected = "an object with contents, or with document"
                raise BadRequest(422, f"{place}: no contents", place, expected)
            found.append(plain)
        return found

    async def with_index(self, work: Callable[[SearchIndex], T], places: int, timeout_seconds: float) -> T:
        """What `work` returns, called with the index in the thread of searches. `places` of a batch are its.

        Raises QueueFull while the index is loading, DeadlinePassed, and what `work` raises.
        """
        if self._opened is None:
            raise QueueFull("the index is still loading")
        (found,) = await self._opened.asks.submit([_Ask(work, places)], 0, timeout_seconds)
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
