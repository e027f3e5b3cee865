"""Searches that begin together go as one request, and none of them is worse off for the others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re

import pytest

from retriever_service import joining
from retriever_service.client import RetrieverClient
from retriever_service.errors import RetrieverUnavailable
from services.common.errors import UserError
from tests.retriever.retriever_fixtures import server, small_index  # noqa: F401

JOIN = 0.02


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Two good searches are enough."""
    monkeypatch.setattr(joining, "GOOD_FIRST", 2)


class Scripted:
    """A retriever whose answer a test chooses by the queries: (status, lists or bytes), or None for never."""

    def __init__(self):
        self.seen: list[list[str]] = []
        self.choose = lambda queries: (200, [found(q) for q in queries])
        self.headers: dict[str, str] = {}
        self.gone = asyncio.Event()

    async def talk(self, reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                size = int(re.search(rb"content-length: (\d+)", head.lower())[1])
                queries = json.loads(await reader.readexactly(size))["queries"]
                self.seen.append(queries)
                chosen = self.choose(queries)
                if chosen is None:
                    await reader.read()
                    self.gone.set()
                    break
                status, answer = chosen
                body = answer if isinstance(answer, bytes) else json.dumps({"result": answer}).encode()
                lines = [f"HTTP/1.1 {status} x", f"content-length: {len(body)}"]
                lines += [f"{name}: {value}" for name, value in self.headers.items()]
                writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        writer.close()

    def joint(self) -> list[list[str]]:
        return [queries for queries in self.seen if len(queries) > 1]


def found(query: str) -> list[dict]:
    return [{"document": {"id": query, "contents": f"about {query}"}, "score": 1.0}]


@pytest.fixture
async def scripted():
    state = Scripted()
    async with await asyncio.start_server(state.talk, "127.0.0.1", 0) as listening:
        state.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        yield state


@contextlib.asynccontextmanager
async def warm(scripted, **options):
    """A client whose searches are joined from here on."""
    async with RetrieverClient(
        scripted.url, join_seconds=JOIN, **({"timeout_seconds": 60} | options)
    ) as client:
        for query in ("first", "second"):
            await client.retrieve([query], 3)
        scripted.seen.clear()
        yield client


async def texts(client, queries, failures=None):
    told = None if failures is None else failures.append
    lists = await asyncio.gather(*(client.retrieve([q], 3, on_failure=told) for q in queries))
    return [[hit.contents for hit in hits] for [hits] in lists]


def about(queries):
    return [[f"about {query}"] for query in queries]


async def test_searches_that_begin_together_go_as_few_requests_and_find_the_same(server):
    questions = ["Mina Frost", "Dove river", "Nile", " "] * 10
    async with RetrieverClient(server.url) as alone, RetrieverClient(server.url, join_seconds=JOIN) as client:
        expected = [await alone.retrieve([q], 3) for q in questions]
        for _ in range(2):
            await client.retrieve(["Nile"], 3)
        posts = []
        post = client._http.post
        client._http.post = lambda *given, **named: posts.append(given) or post(*given, **named)
        assert await asyncio.gather(*(client.retrieve([q], 3) for q in questions)) == expected
    assert len(posts) <= 3


async def test_none_is_joined_before_the_retriever_has_answered_well(scripted):
    async with RetrieverClient(scripted.url, join_seconds=JOIN) as client:
        assert await texts(client, "abcd") == about("abcd")
        assert scripted.joint() == []
        assert await texts(client, "abcd") == about("abcd")
        assert scripted.joint() == [["a", "b", "c", "d"]]


async def test_different_topk_are_different_requests(scripted):
    async with warm(scripted) as client:
        await asyncio.gather(*(client.retrieve([q], topk) for topk in (1, 2) for q in ("a", "b")))
    assert scripted.joint() == [["a", "b"], ["a", "b"]]


async def test_a_joint_request_is_bounded_in_queries_and_in_length(scripted):
    names = [f"q{i}" for i in range(70)]
    async with warm(scripted) as client:
        assert await texts(client, names) == about(names)
        assert max(map(len, scripted.seen)) == joining.MOST_JOINED
        scripted.seen.clear()
        long = [letter * 8000 for letter in "abcdefgh"]
        assert await texts(client, long) == about(long)
        assert all(sum(map(len, queries)) <= joining.MOST_CHARS for queries in scripted.seen)


async def test_a_query_that_is_refused_fails_alone(scripted):
    def choose(queries):
        if "bad" in queries:
            return 422, b'{"detail": "queries: that one"}'
        return 200, [found(q) for q in queries]

    scripted.choose = choose
    failures = []
    async with warm(scripted) as client:
        bad = asyncio.create_task(client.retrieve(["bad"], 3))
        assert await texts(client, "abc", failures) == about("abc")
        with pytest.raises(UserError, match="422 queries: that one"):
            await bad
    assert failures == []


async def test_an_odd_list_of_one_query_is_asked_again_and_the_others_have_theirs(scripted):
    def choose(queries):
        lists = [found(q) for q in queries]
        return 200, [
            "odd" if q == "b" and len(queries) > 1 else one for q, one in zip(queries, lists, strict=True)
        ]

    scripted.choose = choose
    async with warm(scripted) as client:
        assert await texts(client, "abc") == about("abc")
    assert scripted.seen == [["a", "b", "c"], ["b"]]


@pytest.mark.parametrize(
    "answer",
    [
        (200, b"<p>not JSON</p>"),
        (200, [found("one list")]),
        (503, b"{}"),
        (500, b""),
        (429, b"{}"),
        (413, b""),
    ],
    ids=["a page", "one list for all", "full", "broken", "too many", "too large"],
)
async def test_what_a_joint_request_meets_harms_no_search(scripted, answer):
    """No try counts as failed, no Retry-After is waited for, and joint requests become rare."""
    scripted.choose = lambda queries: answer if len(queries) > 1 else (200, [found(queries[0])])
    scripted.headers = {"retry-after": "5"}
    failures = []
    async with warm(scripted) as client:
        joint = []
        for _ in range(8):
            assert await texts(client, "abcd", failures) == about("abcd")
            joint.append(len(scripted.joint()))
    assert failures == [] and joint == [1, 2, 2, 3, 3, 3, 3, 4]


async def test_a_query_that_the_retriever_never_answers_holds_up_the_others_for_a_part_of_their_time(
    scripted, monkeypatch
):
    monkeypatch.setattr(joining, "SHARE", 0.02)
    scripted.choose = lambda queries: None if "slow" in queries else (200, [found(q) for q in queries])
    failures = []
    async with warm(scripted) as client:
        slow = asyncio.create_task(client.retrieve(["slow"], 3))
        assert await texts(client, "ab", failures) == about("ab")
        assert not slow.done() and failures == []
        slow.cancel()
    assert ["slow", "a", "b"] in scripted.seen and ["slow"] in scripted.seen


async def test_one_that_is_cancelled_takes_none_with_it_and_all_take_the_request(scripted):
    async with warm(scripted) as client:
        leaving = asyncio.create_task(client.retrieve(["leaving"], 3))
        staying = asyncio.create_task(client.retrieve(["staying"], 3))
        await asyncio.sleep(0)
        leaving.cancel()
        assert [hit.id for hit in (await staying)[0]] == ["staying"]
        scripted.choose = lambda queries: None
        both = [asyncio.create_task(client.retrieve([q], 3)) for q in "ab"]
        async with asyncio.timeout(60):
            while ["a", "b"] not in scripted.seen:
                await asyncio.sleep(0.01)
        for task in both:
            task.cancel()
        async with asyncio.timeout(60):
            await scripted.gone.wait()


@pytest.mark.parametrize("count", [1, 2, joining.MOST_JOINED], ids=["alone", "gathering", "sent, not begun"])
async def test_searches_of_a_joint_request_that_never_began_end_when_the_client_is_closed(scripted, count):
    async with warm(scripted) as client:
        tasks = [asyncio.create_task(client.retrieve([f"q{i}"], 3)) for i in range(count)]
        await asyncio.sleep(0)
        assert scripted.seen == []
        await client.aclose()
        async with asyncio.timeout(60):
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, RetrieverUnavailable) for one in ended), ended
        assert str(ended[0]) == f"retriever at {scripted.url}: its client is closed"
        with pytest.raises(RetrieverUnavailable, match="its client is closed"):
            await client.retrieve(["later"], 3)
    assert scripted.seen == []


async def test_a_search_in_flight_ends_when_the_client_is_closed(scripted):
    scripted.choose = lambda queries: None
    async with RetrieverClient(scripted.url, timeout_seconds=600) as client:
        task = asyncio.create_task(client.retrieve(["never"], 3))
        async with asyncio.timeout(60):
            while not scripted.seen:
                await asyncio.sleep(0.01)
        await client.aclose()
        async with asyncio.timeout(60):
            with pytest.raises(RetrieverUnavailable, match="its client is closed"):
                await task
