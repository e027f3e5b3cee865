"""What the server does, apart from HTTP: hold the index, search through cache and batcher, write answers."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import orjson
from pydantic import TypeAdapter

from retriever_service.documents import encode_document
from retriever_service.errors import QueueFull
from retriever_service.http.batcher import Batcher, Hits, Search
from retriever_service.http.leniency import clamped, cleaned
from retriever_service.http.metrics import Metrics
from retriever_service.http.schemas import BadRequest, Reply, RerankRequest, parse_body
from retriever_service.index import Index
from retriever_service.settings import ServerSettings

_ENCODED_AT_ONCE = 2000
"""Passages of an answer that are written before others have their turn: some milliseconds."""
_RERANK = TypeAdapter(RerankRequest)


class Service:
    """The index of one application; `index` is None until it is loaded."""

    def __init__(self, settings: ServerSettings, open_index: Callable[[], Index]) -> None:
        self.settings, self.metrics, self._open = settings, Metrics(), open_index
        self.index: Index | None = None
        self.failure: Exception | None = None
        self.left_running = False
        """Whether `stop` left the owner thread at work, which the interpreter would wait for at its end."""
        self._owner = ThreadPoolExecutor(1, "index-owner")
        self._searches: Batcher | None = None
        self._rerankings: Batcher | None = None
        self._cache = ResultCache(settings.cache_size)

    async def load(self) -> None:
        """Open the index, in the thread that will own it. A failure is kept in `failure` and raised."""
        try:
            index = await asyncio.get_running_loop().run_in_executor(self._owner, self._open)
        except Exception as error:
            self.failure = error
            raise
        self.metrics.passages.set(index.info.passages)
        if getattr(index, "reranker", None) is None:
            self._searches = self._batcher(index.search, index.quick)
        else:  # it takes longer by the passage: a batch of 256 queries would outlast the deadline of each
            depth = self.settings.rerank_depth
            self._searches = self._batcher(index.search, index.quick, lambda query, topk: max(topk, depth))
            self._rerankings = self._batcher(
                index.reranker.order, False, lambda item, topk: max(1, len(item[1]))
            )
        self.index = index

    async def stop(self) -> None:
        """Answer what is queued, then close the index."""
        until = time.monotonic() + self.settings.drain_seconds
        done = [
            await b.stop(until - time.monotonic())
            for b in (self._searches, self._rerankings)
            if b is not None
        ]
        self._owner.shutdown(wait=False, cancel_futures=True)
        self.left_running = (self.index is None and self.failure is None) or not all(done)
        if self.index is not None and all(done):
            self.index.close()

    def _batcher(
        self, search: Search, quick: bool, weight: Callable[[Any, int], int] | None = None
    ) -> Batcher:
        settings = self.settings
        return Batcher(
            search, self.metrics, self._owner, quick=quick, batch_size=settings.batch_size,
            batch_wait_ms=settings.batch_wait_ms, max_queued=settings.max_queued, weight=weight,
        )  # fmt: skip

    def loaded(self) -> Index:
        """The index. Raises QueueFull while it is loading."""
        if self.index is None:
            raise QueueFull("the index is still loading")
        return self.index

    async def rerank(self, body: bytes, timeout_seconds: float) -> Reply:
        """`POST /rerank`: from the body of the request to the body of the answer."""
        changed: list[str] = []
        settings, asked = self.settings, parse_body(_RERANK, body)
        if self.index is not None and self._rerankings is None:
            raise BadRequest(404, "no reranker is configured: start the server with --reranker MODEL")
        if self._rerankings is None:
            raise QueueFull("the index is still loading")
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
        documents = [[d.plain() for d in one] for one in asked.documents]
        for i, one in enumerate(documents):
            if len(one) > settings.max_topk:
                limit = settings.max_topk
                raise BadRequest(
                    422,
                    f"documents[{i}]: {len(one)} given, at most {limit} are accepted",
                    f"documents[{i}]",
                    limit,
                )
            if None in one:
                field = f"documents[{i}][{one.index(None)}]"
                raise BadRequest(
                    422, f"{field}: no contents", field, "an object with contents, or with document"
                )
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

    async def search(self, queries: list[str], topk: int, timeout_seconds: float) -> list[Hits]:
        """Hits of each query; a blank one has none."""
        if self._searches is None:
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


async def encode_answer(hits: list[Hits], return_scores: bool) -> bytes:
    """The body of an answer, joined from documents that are JSON already. Others have their turn between the
    parts of a long one."""
    rows, room = [], _ENCODED_AT_ONCE
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
