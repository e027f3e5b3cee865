"""What the server does, apart from HTTP: hold the index, search through cache and batcher, write answers."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import orjson
from pydantic import TypeAdapter

from retriever_service.errors import QueueFull
from retriever_service.http.batcher import Batcher, Q, R
from retriever_service.http.leniency import clamped, cleaned
from retriever_service.http.metrics import Metrics
from retriever_service.http.schemas import BadRequest, GivenDocument, Reply, RerankRequest, parse_body
from retriever_service.index_folder.documents import encode_document
from retriever_service.ranking import Order
from retriever_service.search.search_index import Hits, SearchIndex
from retriever_service.settings import ServerSettings

_ENCODED_AT_ONCE = 2000
"""Passages of an answer that are written before others have their turn: some milliseconds."""
_RERANK = TypeAdapter(RerankRequest)
_Given = tuple[str, tuple[str, ...]]
"""A query and the passages to order by it; hashable, since equal ones of a batch are searched once."""


class Service:
    """The index of one application; `index` is None until it is loaded."""

    def __init__(self, settings: ServerSettings, open_index: Callable[[], SearchIndex]) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self._open = open_index
        self.index: SearchIndex | None = None
        self.failure: Exception | None = None
        self.left_running = False
        """Whether `stop` left the owner thread at work, which the interpreter would wait for at its end."""
        self._owner = ThreadPoolExecutor(1, "index-owner")
        self._searches: Batcher[str, Hits] | None = None
        self._rerankings: Batcher[_Given, Order] | None = None
        self._cache = ResultCache(settings.cache_size)

    async def load(self) -> None:
        """Open the index, in the thread that will own it. What goes wrong is kept in `failure`."""
        try:
            self._take(await asyncio.get_running_loop().run_in_executor(self._owner, self._open))
        except Exception as error:
            self.failure = error

    def _take(self, index: SearchIndex) -> None:
        self.metrics.passages.set(index.info.passages)
        # An index of a user's own may lack what is optional.
        reranker = getattr(index, "reranker", None)
        if reranker is None:
            self._searches = self._batcher(index.search, index.quick)
        else:  # it takes longer by the passage: a batch of 256 queries would outlast the deadline of each
            depth = self.settings.rerank_depth
            self._searches = self._batcher(index.search, index.quick, lambda query, topk: max(topk, depth))
            self._rerankings = self._batcher(reranker.order, False, lambda given, topk: max(1, len(given[1])))
        self.index = index

    async def stop(self) -> None:
        """Answer what is queued, then close the index."""
        until = time.monotonic() + self.settings.drain_seconds
        done = []
        if self._searches is not None:
            done.append(await self._searches.stop(until - time.monotonic()))
        if self._rerankings is not None:
            done.append(await self._rerankings.stop(until - time.monotonic()))
        self._owner.shutdown(wait=False, cancel_futures=True)
        self.left_running = (self.index is None and self.failure is None) or not all(done)
        if self.index is not None and all(done):
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
        if self.index is not None and self._rerankings is None:
            raise BadRequest(404, "no reranker is configured: start the server with --reranker MODEL")
        if self._rerankings is None:
            raise QueueFull("the index is still loading")
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
        orders = await self._rerankings.submit(items, topk, timeout_seconds) if items else []
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

    async def search(self, queries: list[str], topk: int, timeout_seconds: float) -> list[Hits]:
        """Hits of each query; a blank one has none."""
        if self.index is None or self._searches is None:
            raise QueueFull("the index is still loading")
        hits: list[Hits] = [[] for _ in queries]
        missing = []
        keys = []
        for i, query in enumerate(queries):
            if not query or query.isspace():
                continue
            key = (self.index.normalise(query), topk)
            kept = self._cache.get(key)
            if kept is not None:
                hits[i] = kept
            else:
                missing.append(i)
                keys.append(key)
        if missing:
            found = await self._searches.submit([queries[i] for i in missing], topk, timeout_seconds)
            for i, key, one in zip(missing, keys, found, strict=True):
                hits[i] = one
                self._cache.put(key, one)
        metrics = self.metrics
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
