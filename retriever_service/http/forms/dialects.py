"""The requests of the field's clients, and the forms in which each of them reads its answer.

| client | asks | reads |
| --- | --- | --- |
| Search-R1, verl, SkyRL, slime | `/retrieve`: `queries` or `query`, `topk` | `{"result": [[...]]}` |
| rLLM | `/retrieve`: `query`, `top_k` | `{"results": [{"document", "score"}]}` |
| ZeroSearch | `/retrieve` on port 6002: `query`, `top_k` | `[{"text"}]` |
| ASearcher | `/retrieve`: `queries`; `/access`: `urls` | `url` in documents; `{"result": [row or null]}` |
| FlashRAG, ReSearch | `/search`, `/batch_search`: `query`, `top_n` | `[...]` or `[[...], [scores]]` |
"""

from __future__ import annotations

import asyncio
import time
from heapq import nsmallest
from typing import Any

import orjson
from pydantic import TypeAdapter

from retriever_service.errors import DeadlinePassed, RequestRefused
from retriever_service.http.forms.leniency import clamped, cleaned
from retriever_service.http.forms.schemas import (
    AccessRequest,
    BatchSearchRequest,
    Reply,
    RetrieveRequest,
    SearchRequest,
    parse_body,
)
from retriever_service.http.service import Service, encode_answer
from retriever_service.index_folder.rows import Rows, encode_fields
from retriever_service.search.search_index import Hits, PartHits
from services.common.names import nearest

ZEROSEARCH_PORT = 6002
"""The port that ZeroSearch's client has written into it."""
SEARCH_DEFAULT = 10
"""Documents of `/search` and `/batch_search` where no number is asked for, as FlashRAG's server has it."""
_ROWS_AT_ONCE = 50
"""Whole rows that are read before others have their turn: some milliseconds."""
_CHECKED_NAMES = 20
"""Most names of unknown fields that are looked at."""
_RETRIEVE = TypeAdapter(RetrieveRequest)
_SEARCH = TypeAdapter(SearchRequest)
_BATCH_SEARCH = TypeAdapter(BatchSearchRequest)
_ACCESS = TypeAdapter(AccessRequest)


class Dialects:
    """The endpoints that search, over one service: each from the body of a request to the body of its
    answer."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._settings = service.settings
        dialect = service.settings.dialect
        port = service.settings.port
        self._zerosearch = dialect == "zerosearch" or (dialect == "auto" and port == ZEROSEARCH_PORT)

    async def retrieve(self, body: bytes, timeout_seconds: float) -> Reply:
        """`POST /retrieve`."""
        started = time.perf_counter()
        settings = self._settings
        changed: list[str] = []
        asked = parse_body(_RETRIEVE, body)
        limit = asked.limit()
        if asked.queries is not None and asked.query is None:
            self._check_count(asked.queries, "queries")
            queries = cleaned(asked.queries, "queries", settings.max_query_chars, changed)
        elif asked.query is not None and asked.queries is None:
            queries = cleaned([asked.query], "query", settings.max_query_chars, changed, alone=True)
        else:
            given = "both are" if asked.query is not None else "neither is"
            expected = "one of queries and query"
            raise RequestRefused(422, f"queries: {expected} is expected, {given} given", "queries", expected)
        topk = self._topk(*limit, len(queries), settings.topk, changed)
        hits = await self._service.search(queries, topk, timeout_seconds) if queries else []
        missing = _missing(hits)
        if asked.return_fields is not None:
            every = asked.return_fields == "all"
            named = None if every else frozenset(("id", "contents", *asked.return_fields))
            hits = [await self._whole(one, named) for one in hits]
            if named is not None:
                await self._check_fields(named, hits, changed)
        answer = await self._shaped(asked, hits)
        if missing and answer.startswith(b"{"):
            answer = b'%b,"partial":true}' % answer[:-1]
        self._service.metrics.latency.observe(time.perf_counter() - started)
        return Reply(answer, changed, missing)

    async def search(self, body: bytes, timeout_seconds: float) -> Reply:
        """`POST /search`."""
        changed: list[str] = []
        asked = parse_body(_SEARCH, body)
        queries = cleaned([asked.query], "query", self._settings.max_query_chars, changed, alone=True)
        topk = self._topk(*asked.limit(), 1, SEARCH_DEFAULT, changed)
        (hits,) = await self._service.search(queries, topk, timeout_seconds)
        return _flashrag_reply(*_apart(hits), asked.scores(), changed, _missing([hits]))

    async def batch_search(self, body: bytes, timeout_seconds: float) -> Reply:
        """`POST /batch_search`."""
        changed: list[str] = []
        asked = parse_body(_BATCH_SEARCH, body)
        self._check_count(asked.query, "query")
        queries = cleaned(asked.query, "query", self._settings.max_query_chars, changed)
        topk = self._topk(*asked.limit(), len(queries), SEARCH_DEFAULT, changed)
        found = await self._service.search(queries, topk, timeout_seconds) if queries else []
        parts = [_apart(hits) for hits in found]
        documents = b"[%b]" % b",".join(documents for documents, _ in parts)
        scores = b"[%b]" % b",".join(scores for _, scores in parts)
        return _flashrag_reply(documents, scores, asked.scores(), changed, _missing(found))

    async def access(self, body: bytes, timeout_seconds: float) -> Reply:
        """`POST /access`: whole rows by url or id; null for what the corpus does not hold."""
        changed: list[str] = []
        asked = parse_body(_ACCESS, body)
        self._check_count(asked.urls, "urls")
        urls = cleaned(asked.urls, "urls", self._settings.max_query_chars, changed)
        rows = self._rows("urls")
        until = time.monotonic() + timeout_seconds
        most = self._settings.max_passages
        found = []
        read = 0
        since = 0
        for url in urls:
            page, passages = _page(rows, url)
            found.append(encode_fields(page) if page is not None else b"null")
            read += passages
            since += max(passages, 1)
            if read > most:
                raise RequestRefused(422, f"urls: they have more than {most} passages together", "urls", most)
            if since >= _ROWS_AT_ONCE:
                since = 0
                await asyncio.sleep(0)
            if time.monotonic() > until:
                raise DeadlinePassed(f"no answer within {timeout_seconds:.3g} s; ask for fewer urls")
        return Reply(b'{"result":[%b]}' % b",".join(found), changed)

    def _check_count(self, texts: list[str], field: str) -> None:
        limit = min(self._settings.max_queries, self._settings.max_passages)
        if len(texts) > limit:
            counts = f"{len(texts)} given, at most {limit} are accepted"
            raise RequestRefused(422, f"{field}: {counts}", field, limit)

    def _topk(self, name: str, topk: int | None, queries: int, default: int, changed: list[str]) -> int:
        """The number of documents meant: null and 0 are the default; what is too high, alone or with so many
        queries, is lowered."""
        settings = self._settings
        most = min(settings.max_topk, settings.max_passages // max(queries, 1))
        return clamped(topk, most, name, changed) if topk else min(default, most)

    def _rows(self, field: str) -> Rows:
        rows: Rows | None = getattr(self._service.loaded(), "rows", None)
        if rows is None:
            what = "holds no whole rows; `unspiral index build --corpus FILE --out DIR` makes one that does"
            raise RequestRefused(422, f"{field}: the index {what}", field, "an index with whole rows")
        return rows

    async def _whole(self, hits: Hits, named: frozenset[str] | None) -> Hits:
        """The hits with the fields of these names, None for all."""
        rows = self._rows("return_fields")
        found: Hits = []
        for number, (document, score) in enumerate(hits, 1):
            row = rows.whole(document)
            if named is not None:
                row = {name: value for name, value in row.items() if name in named}
            found.append((encode_fields(row), score))
            if number % _ROWS_AT_ONCE == 0:
                await asyncio.sleep(0)
        return found

    async def _check_fields(self, named: frozenset[str], hits: list[Hits], changed: list[str]) -> None:
        """Raises RequestRefused for a field that no passage has, and notes one that only may be there: of a
        large corpus a sample was looked at."""
        absent = named - {name for one in hits for document, _ in one for name in orjson.loads(document)}
        if not absent:
            return
        known, all_seen = await asyncio.to_thread(self._rows("return_fields").names)
        for name in nsmallest(_CHECKED_NAMES, absent - {*known}):
            accepted = ", ".join(known)
            near = nearest(name, known)
            if all_seen or near:
                guess = f"; did you mean {near}?" if near else ""
                what = f"no passage has the field {name!r}; its fields are {accepted}{guess}"
                raise RequestRefused(422, f"return_fields: {what}", "return_fields", accepted)
            changed.append(f"return_fields: {name} is in no passage of this answer")

    async def _shaped(self, asked: RetrieveRequest, hits: list[Hits]) -> bytes:
        if self._zerosearch and asked.query is not None:
            return b"[%b]" % b",".join(_as_text(document, score) for document, score in hits[0])
        if asked.top_k is None:
            return await encode_answer(hits, asked.return_scores)
        # rLLM's name of the limit: its server gives scores unless told otherwise, and one query a flat list
        # besides.
        scored = asked.return_scores or "return_scores" not in asked.model_fields_set
        result = await encode_answer(hits, scored)
        method = orjson.dumps(self._service.loaded().info.backend)
        if asked.query is None:
            return b'{"method":%b,"batch_size":%d,%b' % (method, len(hits), result[1:])
        flat = b",".join(b'{"document":%b,"score":%b}' % (d, orjson.dumps(s)) for d, s in hits[0])
        query = orjson.dumps(asked.query)
        return b'{"query":%b,"method":%b,"results":[%b],"num_results":%d,%b' % (
            query, method, flat, len(hits[0]), result[1:]
        )  # fmt: skip


def _flashrag_reply(
    documents: bytes, scores: bytes, with_scores: bool, changed: list[str], missing: str
) -> Reply:
    """What FlashRAG's clients read: the documents, or the list of documents and scores."""
    return Reply(b"[%b,%b]" % (documents, scores) if with_scores else documents, changed, missing)


def _missing(hits: list[Hits]) -> str:
    """The shards that are missing in one of the lists, and why."""
    return next((one.missing for one in hits if isinstance(one, PartHits)), "")


def _apart(hits: Hits) -> tuple[bytes, bytes]:
    """The JSON lists of documents and of scores."""
    return b"[%b]" % b",".join(document for document, _ in hits), orjson.dumps([score for _, score in hits])


def _as_text(document: bytes, score: float) -> bytes:
    found = orjson.loads(document)
    return orjson.dumps({"text": found["contents"], "id": found["id"], "score": score})


def _page(rows: Rows, url: str) -> tuple[dict[str, Any] | None, int]:
    """The row of a url or id; of several passages with one url the first, with the contents of all. And how
    many they are."""
    for key in dict.fromkeys([url, url.replace("index.php/", "index.php?title="), url.strip().rstrip("/")]):
        if found := rows.find(key):
            pages = [rows.row(number) for number in found]
            contents = "\n".join(page["contents"] for page in pages)
            return pages[0] | {"contents": contents}, len(found)
    return None, 0
