"""What the server does, apart from HTTP: hold the index, search through cache and batcher, write answers."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

import orjson
from pydantic import TypeAdapter

from .batcher import Batcher, Hits
from .errors import QueueFull
from .index import Index
from .metrics import Metrics
from .schemas import BadRequest, RetrieveRequest, check_texts, check_topk, parse_body
from .settings import ServerSettings

_RETRIEVE = TypeAdapter(RetrieveRequest)


class Service:
    """The index of one application; `index` is None until it is loaded."""

    def __init__(self, settings: ServerSettings, open_index: Callable[[], Index]) -> None:
        self.settings, self.metrics, self._open = settings, Metrics(), open_index
        self.index: Index | None = None
        self.failure: Exception | None = None
        self._batcher: Batcher | None = None
        self._cache = ResultCache(settings.cache_size)

    def load(self) -> None:
        """Open the index. A failure is kept in `failure` and raised."""
        settings = self.settings
        try:
            index = self._open()
        except Exception as error:
            self.failure = error
            raise
        self.metrics.passages.set(index.info.passages)
        self._batcher = Batcher(
            index.search,
            self.metrics,
            batch_size=settings.batch_size,
            batch_wait_ms=settings.batch_wait_ms,
            max_queued=settings.max_queued,
            quick=index.quick,
        )
        self.metrics.queued.set_function(lambda: self._batcher.queued)
        self.index = index

    async def stop(self) -> None:
        """Answer what is queued, then close the index."""
        if self._batcher and await self._batcher.stop(self.settings.drain_seconds):
            self.index.close()

    async def retrieve(self, body: bytes, timeout_seconds: float) -> bytes:
        """`POST /retrieve`: from the body of the request to the body of the answer."""
        started, settings = time.perf_counter(), self.settings
        asked: RetrieveRequest = parse_body(_RETRIEVE, body)
        queries = asked.queries
        if (queries is None) == (asked.query is None):
            given = "both are" if queries is not None else "neither is"
            raise BadRequest(
                422, f"queries: one of queries and query is expected, {given} given", "queries", "one of queries and query"
            )
        if queries is None:
            queries = [asked.query]
        check_texts(queries, "queries", settings.max_queries, settings.max_query_chars)
        topk = check_topk(asked.topk, settings.topk, settings.max_topk)
        hits = await self.search(queries, topk, timeout_seconds) if queries else []
        answer = encode_answer(hits, asked.return_scores)
        self.metrics.latency.observe(time.perf_counter() - started)
        return answer

    async def search(self, queries: list[str], topk: int, timeout_seconds: float) -> list[Hits]:
        """Hits of each query; a blank one has none."""
        if self._batcher is None:
            raise QueueFull("the index is still loading")
        hits: list[Hits | None] = [None] * len(queries)
        missing, keys = [], []
        for i, query in enumerate(queries):
            if not query or query.isspace():
                hits[i] = []
                continue
            key = (self.index.normalise(query), topk)
            hits[i] = self._cache.get(key)
            if hits[i] is None:
                missing.append(i)
                keys.append(key)
        if missing:
            found = await self._batcher.submit([queries[i] for i in missing], topk, timeout_seconds)
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
        self._size, self._entries = size, OrderedDict()

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


def encode_answer(hits: list[Hits], return_scores: bool) -> bytes:
    """The body of an answer, joined from documents that are JSON already."""
    if return_scores:
        rows = [b",".join([b'{"document":%b,"score":%b}' % (d, orjson.dumps(s)) for d, s in one]) for one in hits]
    else:
        rows = [b",".join([d for d, _ in one]) for one in hits]
    return b'{"result":[%b]}' % b",".join([b"[%b]" % row for row in rows])
