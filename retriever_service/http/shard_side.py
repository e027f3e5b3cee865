"""The routes by which a server is a shard of a larger index (`retriever_service.shards`)."""

from __future__ import annotations

import time

import numpy as np
import orjson
from fastapi import Response
from pydantic import TypeAdapter

from retriever_service.errors import RequestRefused
from retriever_service.http.forms.leniency import cleaned
from retriever_service.http.forms.schemas import Reply, parse_body
from retriever_service.http.service import Service, encode_answer
from retriever_service.http.web import JsonEndpoint, RetrieverApp
from retriever_service.index_folder.description import IndexInfo, version_of
from retriever_service.index_folder.segments import SegmentedDocuments
from retriever_service.ranking import RankerOfPart, Statistics
from retriever_service.search.search_index import Hits, RankedIndex, SearchIndex
from retriever_service.shards import wire
from services.common.http.bodies import Room

_FREQUENCIES = TypeAdapter(wire.FrequenciesAsked)
_SEARCH = TypeAdapter(wire.SearchAsked)
_SHARED = ("analyzer", "k1", "b", "postings", "fingerprint", "type")
"""Settings that all shards must share, besides the family of the encoder."""
_LOOKED_AT = 32
"""Ids of which is concluded that all are numbers."""


def add_shard_routes(app: RetrieverApp, service: Service, bodies: Room) -> None:
    """Add them. They stand behind the same gate and limits as every other route."""
    side = _ShardSide(service)
    for path, answer in ((wire.FREQUENCIES, side.frequencies), (wire.SEARCH, side.search)):
        endpoint = JsonEndpoint(path, answer, service.settings, service.metrics, bodies)
        app.add_endpoint(endpoint, include_in_schema=False)

    @app.get(wire.ABOUT, include_in_schema=False)
    async def about() -> Response:
        return Response(side.about(service.loaded()), media_type="application/json")


def about_of(index: SearchIndex) -> wire.About:
    """What a server before this one must know of an index."""
    info = index.info
    ranker = _ranker_of(index)
    return wire.About(
        version=version_of(info),
        backend=info.backend,
        passages=info.passages,
        tokens=ranker.statistics.tokens if isinstance(ranker, RankerOfPart) else None,
        settings=_shared(info),
        numbers=numbers_of(index),
    )


def numbers_of(index: SearchIndex) -> wire.Numbers | None:
    """What a sample of its ids says: whether they are ascending whole numbers, as those of rows without ids
    are. Of an index in segments only the first is looked at."""
    if not isinstance(index, RankedIndex):
        return None
    documents = index.documents
    rows = documents.count
    if isinstance(documents, SegmentedDocuments):
        documents = documents.parts[0]
    ids = [
        documents.get(row)[0] for row in np.linspace(0, documents.count - 1, _LOOKED_AT, dtype=int).tolist()
    ]
    if not all(identity.isascii() and identity.isdecimal() for identity in ids):
        return None
    found = [int(identity) for identity in ids]
    if found != sorted(found):
        return None
    # A deleted passage has no id any more; it may be of this segment.
    count = documents.count - (rows - index.info.passages)
    return wire.Numbers(first=found[0], last=found[-1], count=count) if count > 0 else None


def _shared(info: IndexInfo) -> dict:
    found = {name: value for name, value in info.settings.items() if name in _SHARED}
    encoder = info.settings.get("encoder")
    return found | ({"family": encoder["family"], "max_tokens": encoder["max_tokens"]} if encoder else {})


def _ranker_of(index: SearchIndex):
    return index.ranker if isinstance(index, RankedIndex) else None


class _ShardSide:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._known: tuple[SearchIndex, str] | None = None
        self._about: tuple[SearchIndex, str] | None = None

    def about(self, index: SearchIndex) -> str:
        """`GET /shard`, as JSON. Servers before this one ask every few seconds."""
        if self._about is None or self._about[0] is not index:
            self._about = index, about_of(index).model_dump_json()
        return self._about[1]

    def _require(self, version: str, index: SearchIndex) -> None:
        """In the thread of searches. Raises RequestRefused where the index is another one by now."""
        if self._known is None or self._known[0] is not index:
            self._known = index, version_of(index.info)
        have = self._known[1]
        if version != have:
            what = f"version: {version} is asked for, the index is {have}"
            raise RequestRefused(wire.OTHER_VERSION, what, "version", have)

    async def frequencies(self, body: bytes, timeout_seconds: float) -> Reply:
        """`POST /shard/frequencies`."""
        asked = parse_body(_FREQUENCIES, body)

        def count(index: SearchIndex) -> list[int]:
            self._require(asked.version, index)
            return _of_part(index).frequencies_of(asked.terms)

        found = await self._service.with_index(count, len(asked.terms), timeout_seconds)
        return Reply(orjson.dumps({"frequencies": found}), [])

    async def search(self, body: bytes, timeout_seconds: float) -> Reply:
        """`POST /shard/search`: as `/retrieve` with scores answers."""
        started = time.perf_counter()
        asked = parse_body(_SEARCH, body)
        settings = self._service.settings
        if len(asked.queries) > settings.max_queries:
            counts = f"{len(asked.queries)} given, at most {settings.max_queries} are accepted"
            raise RequestRefused(422, f"queries: {counts}", "queries", settings.max_queries)
        most = min(settings.max_topk, settings.max_passages // max(len(asked.queries), 1))
        if not 1 <= asked.topk <= most:
            what = f"topk: {asked.topk} is asked for, 1 to {most} are accepted (--max-topk, --max-passages)"
            raise RequestRefused(422, what, "topk", most)
        queries = cleaned(asked.queries, "queries", settings.max_query_chars, [])

        def search(index: SearchIndex) -> list[Hits]:
            self._require(asked.version, index)
            if not isinstance(index, RankedIndex):
                return index.search(queries, asked.topk)
            if asked.whole is None:
                found = index.ranker.rank(queries, asked.topk)
            else:
                whole = Statistics(asked.whole.passages, asked.whole.tokens, asked.whole.frequencies)
                found = _of_part(index).rank_among(queries, asked.topk, whole)
            return index.with_text(found)

        hits = await self._service.with_index(search, len(queries), timeout_seconds) if queries else []
        metrics = self._service.metrics
        metrics.queries.inc(len(queries))
        metrics.latency.observe(time.perf_counter() - started)
        return Reply(await encode_answer(hits, True), [])


def _of_part(index: SearchIndex) -> RankerOfPart:
    ranker = _ranker_of(index)
    if not isinstance(ranker, RankerOfPart):
        what = "the index takes no statistics of others; `unspiral index build --postings packed` makes one"
        raise RequestRefused(422, f"whole: {what}", "whole", "an index of packed postings")
    return ranker
