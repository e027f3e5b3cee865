"""Results that are kept: the same answer without a search, by normalised query and topk, the least recently
used out first."""

from __future__ import annotations

import asyncio

import httpx
import orjson
import pytest

from retriever_service.errors import QueueFull, RequestRefused
from retriever_service.http.forms.dialects import Dialects
from retriever_service.http.launch import serve_in_thread
from retriever_service.http.service import ResultCache, Service, encode_answer
from retriever_service.search.index import Index
from retriever_service.settings import ServerSettings
from tests.retriever.retriever_fixtures import small_index  # noqa: F401


class Counting(Index):
    """Writes down what was searched for."""

    def __init__(self, folder):
        super().__init__(folder)
        self.searched = []

    def search(self, queries, topk):
        self.searched += [(q, topk) for q in queries]
        return super().search(queries, topk)


@pytest.mark.parametrize("quick", [True, False])
def test_a_query_that_was_asked_before_is_not_searched_again(small_index, quick):
    opened = []

    def open_index():
        opened.append(Counting(small_index))
        opened[0].quick = quick
        return opened[0]

    with serve_in_thread(
        ServerSettings(index=str(small_index), port=0, cache_size=2), open_index=open_index
    ) as server:

        def ask(*queries, topk=2):
            body = {"queries": list(queries), "topk": topk, "return_scores": True}
            return httpx.post(f"{server.url}/retrieve", json=body, trust_env=False, timeout=60).json()[
                "result"
            ]

        first = ask("Which river flows past Morwen?")
        searched = opened[0].searched
        assert len(searched) == 1
        assert ask("  which RIVER flows   past morwen?") == first and len(searched) == 1
        assert ask("Which river flows past Morwen?", topk=1) == [first[0][:1]] and len(searched) == 2
        again = ask("Which river flows past Morwen?", "weaver", "", "weaver")
        assert again[0] == first[0] and again[1] == again[3] and again[2] == []
        assert [q for q, _ in searched[2:]] in (["weaver"], ["weaver", "weaver"])
        known = len(searched)
        ask(
            "Which river flows past Morwen?"
        )  # used more lately than the one with topk=1, which went out for the weaver
        assert len(searched) == known
        ask("Which river flows past Morwen?", topk=1)
        assert len(searched) == known + 1
        text = httpx.get(f"{server.url}/metrics", trust_env=False).text
        assert "retriever_cached_queries_total 4.0" in text  # the blank one too


def test_the_least_recently_used_goes_first_and_no_room_keeps_nothing():
    cache = ResultCache(2)
    for name in "ab":
        cache.put((name, 3), [(name.encode(), 1.0)])
    assert cache.get(("a", 3)) == [(b"a", 1.0)]
    cache.put(("c", 3), [])
    assert cache.get(("b", 3)) is None and cache.get(("a", 3)) and cache.get(("c", 3)) == []
    nothing = ResultCache(0)
    nothing.put(("a", 3), [])
    assert nothing.get(("a", 3)) is None


async def test_others_have_their_turn_while_a_long_answer_is_written():
    """A million passages, which one request may ask for, take seconds."""
    turns = 0

    async def count():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    answer = await encode_answer([[(b'{"id":"0"}', 1.5)] * 1000] * 60, True)
    counting.cancel()
    assert turns >= 19 and answer.count(b'{"document":{"id":"0"},"score":1.5}') == 60_000
    assert await encode_answer([[(b"1", 1.0), (b"2", 1.0)], []], False) == b'{"result":[[1,2],[]]}'


class Literal:
    """A reranker that reads capitals and spaces, as those of cased models do: the score is the share of
    capitals."""

    def order(self, items, topk):
        return [
            [(i, sum(c.isupper() for c in query) / len(query)) for i in range(len(texts))][:topk]
            for query, texts in items
        ]


def test_a_reranker_that_reads_capitals_gets_no_answer_of_other_capitals(small_index):
    settings = ServerSettings(index=str(small_index), port=0)
    with serve_in_thread(settings, open_index=lambda: Index(small_index, reranker=Literal())) as server:
        for query in ("mina frost", "Mina Frost", "MINA FROST", "mina  frost"):
            body = {"query": query, "topk": 1, "return_scores": True}
            ((hit,),) = httpx.post(f"{server.url}/retrieve", json=body, trust_env=False, timeout=60).json()[
                "result"
            ]
            assert hit["score"] == sum(c.isupper() for c in query) / len(query)


def test_queries_to_an_encoder_share_an_answer_only_where_they_are_the_same():
    """Tokenizers of bytes and of pieces see every space; others join what a control character parts."""
    from retriever_service.dense.search import DenseRanker
    from retriever_service.ranking import HybridRanker
    from retriever_service.search.remote import QdrantIndex

    for kind in (DenseRanker, HybridRanker, QdrantIndex):
        ranker = kind.__new__(kind)
        assert len({ranker.normalise(q) for q in ("a b", "a  b", "a\x1fb", " a b", "A b")}) == 5


async def test_the_limit_that_too_many_queries_name_is_one_that_is_taken():
    dialects = Dialects(Service(ServerSettings(index="i", max_passages=10), lambda: None))
    with pytest.raises(RequestRefused) as error:
        await dialects.retrieve(orjson.dumps({"queries": ["a"] * 20, "topk": 1}), 1)
    assert (error.value.field, error.value.limit) == ("queries", 10)
    assert "at most 10 are accepted" in error.value.detail
    with pytest.raises(QueueFull, match="loading"):  # so it was taken
        await dialects.retrieve(orjson.dumps({"queries": ["a"] * 10, "topk": 1}), 1)
