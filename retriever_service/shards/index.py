"""Searching an index that lies in shards: several servers of this package, each with a part of the passages.

The scores of one BM25 index depend on all its passages. So the shards count the terms of the queries first,
and are then searched by the sums: the best of all shards are those of one index of all passages, with the
same scores, equal ones by shard and row. Inner products need none of that.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, cast

import httpx
import orjson

from retriever_service.bm25.analysis import Analyzer, AnalyzerSettings
from retriever_service.errors import RetrieverUnavailable
from retriever_service.index_folder.description import IndexInfo, IndexSettings
from retriever_service.index_folder.rows import Rows
from retriever_service.ranking import Reranker
from retriever_service.search.search_index import Hits, PartHits
from retriever_service.settings import SHARDS
from retriever_service.shards import wire
from retriever_service.shards.agreement import agreed
from retriever_service.shards.asking import Content, Shard, Unavailable, parse
from services.common.errors import EnvironmentLacks, UserError

START_SECONDS = 60.0
"""Longest wait at the start for a shard that shows no sign of life."""
LOADING_SECONDS = 600.0
"""Longest wait for one that says it is loading."""
LOOK_SECONDS = 5.0
"""Seconds between two looks at the shards for another index."""
OUT_SECONDS = 5.0
"""Seconds that a shard which failed is left out, where partial answers are allowed."""
_ROUNDS = 8
"""Most times that a search begins again because a shard has another index by now."""
_KNOWN_TERMS = 1_000_000


class ShardedIndex:
    """The protocol ChangingIndex over shards.

    A shard that does not answer fails the search, with its address (RetrieverUnavailable). With `partial` the
    others answer without it, as one index of their passages would, and the hits are PartHits. A request that
    a shard refuses as wrong is refused (RequestRefused), and the shard is as well as before.
    """

    quick = False
    rows: Rows | None = None

    def __init__(
        self,
        address: str,
        *,
        timeout_seconds: float,
        partial: bool = False,
        token: str | None = None,
        tell: Callable[[str], None] = lambda line: None,
        reranker: Reranker | None = None,
        rerank_depth: int = 20,
    ) -> None:
        """Waits until every shard has loaded its index; `tell` is told for which, and why.

        Raises UserError where the shards do not go together, EnvironmentLacks where one does not answer."""
        self._timeout = timeout_seconds
        self._partial = partial
        self.reranker = reranker
        self._depth = rerank_depth
        headers = {"content-type": "application/json"} | (
            {"authorization": f"Bearer {token}"} if token else {}
        )
        # No timeout of its own: each request has what is left of its search's time (`Shard.ask`).
        self._http = httpx.AsyncClient(headers=headers, timeout=None, trust_env=False)
        self._shards = [Shard(one, self._http) for one in parse(address.removeprefix(SHARDS))]
        self._generation = 0
        # Searches come from any thread, and share the connections of one loop.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="shards", daemon=True)
        self._thread.start()
        with ExitStack() as undo:
            undo.callback(self.close)
            self._call(self._look_at_all(tell))
            self._settings = self._agreed()
            undo.pop_all()
        # Several shards of BM25 are scored as one index: each is told how often a term stands in all of them.
        self._analyzer = None
        if len(self._shards) > 1 and self._settings["backend"] == "bm25":
            self._analyzer = Analyzer(AnalyzerSettings(**self._settings["analyzer"]))
        self.info = self._described(address)
        self.on_change: Callable[[], None] = _nothing
        self._looking = asyncio.run_coroutine_threadsafe(self._keep_looking(), self._loop)

    def search(self, queries: Sequence[str], topk: int) -> list[Hits]:
        """As SearchIndex."""
        asked = [i for i, query in enumerate(queries) if query and not query.isspace()]
        found: list[Hits] = [[] for _ in queries]
        if not asked:
            return found
        texts = [queries[i] for i in asked]
        depth = topk if self.reranker is None else max(topk, self._depth)
        merged, missing = self._call(self._search(texts, depth))
        for i, text, hits in zip(asked, texts, merged, strict=True):
            if self.reranker is not None:
                (order,) = self.reranker.order([(text, [_contents(raw) for raw, _ in hits])], topk)
                hits = [(hits[at][0], float(score)) for at, score in order]
            found[i] = PartHits(hits, missing) if missing else hits
        return found

    def normalise(self, query: str) -> str:
        """As SearchIndex: no answer of an index that a shard has exchanged is kept."""
        return f"{self._generation} {query}"

    def close(self) -> None:
        """Give the connections back."""
        if not self._thread.is_alive():
            return
        for task in asyncio.run_coroutine_threadsafe(self._wind_up(), self._loop).result(10):
            task.cancel()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    async def _wind_up(self) -> list[asyncio.Task]:
        await self._http.aclose()
        return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _described(self, address: str) -> IndexInfo:
        known = [shard.known.about for shard in self._shards]
        versions = "\n".join(about.version for about in known)
        return IndexInfo(
            backend=self._settings["backend"],
            corpus=address,
            corpus_sha256=hashlib.sha256(versions.encode()).hexdigest(),
            passages=sum(about.passages for about in known),
            settings=cast("IndexSettings", {k: v for k, v in self._settings.items() if k != "backend"}),
        )

    def _agreed(self) -> dict[str, Any]:
        return agreed([(shard.name, shard.known.about) for shard in self._shards])

    async def _look_at_all(self, tell: Callable[[str], None]) -> None:
        waits: dict[Shard, str] = {}

        def note(shard: Shard, reason: str) -> None:
            waits[shard] = reason
            tell("; ".join(reason for reason in waits.values() if reason))

        await asyncio.gather(*(self._wait_for(shard, note) for shard in self._shards))

    async def _wait_for(self, shard: Shard, note: Callable[[Shard, str], None]) -> None:
        began = time.monotonic()
        while True:
            try:
                shard.content = Content(await shard.look(time.monotonic() + self._timeout))
                note(shard, "")
                return
            except Unavailable as error:
                note(shard, str(error))
                passed = time.monotonic() - began
                if passed > (LOADING_SECONDS if error.loading else START_SECONDS):
                    raise EnvironmentLacks(f"{error} (waited {passed:.0f} s)") from None
            await asyncio.sleep(0.2)

    async def _keep_looking(self) -> None:
        """Notice another index of a shard also where every answer comes from the cache."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for shard in self._shards:
                # Why it does not fit is told by the next search.
                await self._fit_again(shard, time.monotonic() + self._timeout)

    def _take(self, shard: Shard, about: wire.About) -> None:
        """Raises UserError where the new index of a shard does not go with the others."""
        before = shard.known
        if about.version == before.about.version:
            return
        shard.content = Content(about)
        try:
            self._agreed()
        except UserError:
            shard.content = before
            raise
        self._generation += 1
        self.info = self._described(self.info.corpus)
        self.on_change()

    async def _search(self, queries: list[str], topk: int) -> tuple[list[Hits], str]:
        """The merged hits of each query, and which shards are missing and why."""
        reasons: dict[Shard, str] = {}
        now = time.monotonic()
        if self._partial:
            reasons = {s: f"shard {s.name}: failed lately" for s in self._shards if s.out_until > now}
        until = now + self._timeout
        for _ in range(_ROUNDS + len(self._shards)):
            used = [shard for shard in self._shards if shard not in reasons]
            if not used:
                raise RetrieverUnavailable("; ".join(reasons.values()))
            try:
                return await self._round(used, queries, topk, until), "; ".join(reasons.values())
            except Unavailable as error:
                shard = error.shard
                reason = await self._fit_again(shard, until) if error.other_version else str(error)
            if not reason:
                continue
            if not self._partial:
                raise RetrieverUnavailable(reason)
            reasons[shard] = reason
            shard.out_until = time.monotonic() + OUT_SECONDS
            until = time.monotonic() + self._timeout
        raise RetrieverUnavailable(f"shards {self.info.corpus}: their indexes change faster than they answer")

    async def _fit_again(self, shard: Shard, until: float) -> str:
        """Take the new index of a shard. Returns why it cannot be used, empty where it can."""
        try:
            self._take(shard, await shard.look(until))
        except (Unavailable, UserError) as error:
            return str(error)
        return ""

    async def _round(self, shards: list[Shard], queries: list[str], topk: int, until: float) -> list[Hits]:
        contents = [shard.known for shard in shards]
        pairs = list(zip(shards, contents, strict=True))
        asked: dict[str, Any] = {"queries": queries, "topk": topk}
        if self._analyzer is not None:
            terms = list(dict.fromkeys(term for query in queries for term in self._analyzer.terms(query)))
            counts = await _all([_counts(shard, content, terms, until) for shard, content in pairs])
            asked["whole"] = {
                "passages": sum(content.about.passages for content in contents),
                "tokens": sum(content.about.tokens or 0 for content in contents),
                "frequencies": dict(zip(terms, map(sum, zip(*counts, strict=True)), strict=True)),
            }
        answers = await _all([shard.ask(wire.SEARCH, content, asked, until) for shard, content in pairs])
        lists = [_hits(shard, answer, len(queries)) for shard, answer in zip(shards, answers, strict=True)]
        numbers = [1 + self._shards.index(shard) for shard in shards]
        return [merged([of_shard[i] for of_shard in lists], numbers, topk) for i in range(len(queries))]


def _nothing() -> None:
    """Nobody wants to know."""


async def _all(work: list[Any]) -> list[Any]:
    """All results; when all have ended, the first error."""
    done = await asyncio.gather(*work, return_exceptions=True)
    for one in done:
        if isinstance(one, BaseException):
            raise one
    return done


async def _counts(shard: Shard, content: Content, terms: list[str], until: float) -> list[int]:
    """How many passages of a shard have each term."""
    known = content.frequencies
    unknown = [term for term in terms if term not in known]
    if unknown:
        answer = await shard.ask(wire.FREQUENCIES, content, {"terms": unknown}, until)
        counts = answer.get("frequencies")
        if not isinstance(counts, list) or len(counts) != len(unknown):
            raise Unavailable(shard, f"its answer to {wire.FREQUENCIES} is not one count a term")
        known.update(zip(unknown, counts, strict=True))
    found = [known[term] for term in terms]
    if len(known) > _KNOWN_TERMS:
        known.clear()
    return found


def _hits(shard: Shard, answer: dict[str, Any], count: int) -> list[Hits]:
    """The hits of a shard. Raises Unavailable for an answer that is not one list a query."""
    try:
        found = [
            [(orjson.dumps(hit["document"]), float(hit["score"])) for hit in hits]
            for hits in answer["result"]
        ]
    except (KeyError, TypeError, ValueError):
        found = []
    if len(found) != count:
        raise Unavailable(shard, f"its answer to {wire.SEARCH} is not one list a query")
    return found


def merged(lists: Sequence[Hits], numbers: Sequence[int], topk: int) -> Hits:
    """The best of several lists, each best first; equal scores in the order of the lists. Of different
    documents with one id those of the higher shards get the number of their shard behind it: `17#2`."""
    every = [(hit, number) for hits, number in zip(lists, numbers, strict=True) for hit in hits]
    every.sort(key=lambda one: -one[0][1])
    best = [(hit, number, orjson.loads(hit[0])) for hit, number in every[:topk]]
    first: dict[str, bytes] = {}
    for (raw, _), _, document in sorted(best, key=lambda one: one[1]):
        first.setdefault(document["id"], raw)
    found: Hits = []
    for (raw, score), number, document in best:
        if first[document["id"]] != raw:
            raw = orjson.dumps(document | {"id": f"{document['id']}#{number}"})
        found.append((raw, score))
    return found


def _contents(raw: bytes) -> str:
    return orjson.loads(raw)["contents"]
