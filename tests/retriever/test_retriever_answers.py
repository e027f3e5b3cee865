"""What a retriever may answer, over real HTTP: read where it can be read, asked for again where not, never
taken for an empty result."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import time

import pytest
from test_retriever_client import scripted  # noqa: F401

from retriever_service.answer import Hit, read_answer
from retriever_service.client import RetrieverClient
from retriever_service.errors import RetrieverUnavailable
from services.common.answers import clean_text, read_json

GOOD = [[Hit("a", "b", 1.5)]]
ONE = {"result": [[{"document": {"id": "a", "contents": "b"}, "score": 1.5}]]}


def hit(contents="b", **more):
    return {"document": {"id": "a", "contents": contents}, "score": 1.5} | more


def body(result) -> bytes:
    return json.dumps({"result": result}).encode()


ODD = {
    "contents null": (200, body([[hit(None)]]), {}),
    "contents a number": (200, body([[hit(7)]]), {}),
    "no document": (200, body([[{"score": 1}]]), {}),
    "a page with 200": (200, b"<html><h1>Welcome</h1></html>", {"content-type": "text/html"}),
    "nothing": (200, b"", {}),
    "half an answer": (200, b'{"result": [[{"docu', {}),
    "another program": (200, b'{"status": "ok"}', {}),
    "not nested": (200, body([hit()]), {}),
    "null for a list": (200, body([None]), {}),
    "too few lists": (200, body([]), {}),
    "too many lists": (200, body([[hit()], [hit()]]), {}),
    "broken gzip": (200, b"no gzip", {"content-encoding": "gzip"}),
    "brackets without end": (200, b"[" * 200_000, {}),
    "404 of an ingress": (404, b"default backend - 404", {}),
    "408 of an ingress": (408, b"", {}),
    "425 of an ingress": (425, b"", {}),
    "a strange wait": (503, b"", {"retry-after": "\xb2"}),
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD.keys())
async def test_an_odd_answer_is_asked_for_again(scripted, odd):
    url, answers, seen = scripted
    answers += [odd, (200, ONE, {})]
    async with RetrieverClient(url, timeout_seconds=20) as client:
        told: list[str] = []
        assert await client.retrieve(["q"], 3, on_failure=told.append) == GOOD
    assert len(seen) == 2 and len(told) == 1


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (
            "contents null",
            r"no usable answer within 1 s \(\d+ tries\): .* result\[0\]\[0\]: no text under",
        ),
        ("a page with 200", "no usable answer within .*: not JSON .*'<html><h1>Welcome</h1></html>'"),
        ("too few lists", "no usable answer within .*: 0 lists for 1 queries"),
        ("404 of an ingress", "no answer within .*: 404 default backend - 404"),
        ("broken gzip", "no usable answer within .*: DecodingError"),
        ("brackets without end", "no usable answer within .*: JSON that is nested too deeply"),
    ],
)
async def test_an_odd_answer_that_stays_is_one_line_and_what_the_environment_lacks(scripted, odd, reason):
    url, answers, seen = scripted
    answers.append(ODD[odd])
    async with RetrieverClient(url, timeout_seconds=1) as client:
        with pytest.raises(RetrieverUnavailable, match=f"^retriever at {url}: {reason}") as error:
            await client.retrieve(["q"], 3)
    assert error.value.exit_code == 3 and "\n" not in str(error.value) and len(str(error.value)) < 400
    assert len(seen) > 1


NOT_A_NUMBER = b'{"result": [[{"document": {"id": "a", "contents": "b"}, "score": NaN}]]}'
HUGE = b'{"result": [[{"document": {"id": "a", "contents": "b"}, "score": 1' + b"0" * 400 + b"}]]}"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (body([[hit(score=None)]]), Hit("a", "b", None)),
        (NOT_A_NUMBER, Hit("a", "b", None)),
        (HUGE, Hit("a", "b", None)),
        (body([[hit(score="0.5")]]), Hit("a", "b", 0.5)),
        (body([[{"document": {"id": 12, "contents": "b"}}]]), Hit("12", "b", None)),
        (body([[{"id": "a", "contents": "b"}]]), Hit("a", "b", None)),
        (b"\xef\xbb\xbf" + body([[hit()]]), Hit("a", "b", 1.5)),
        (
            b'{"result": [[{"document": {"id": "a", "contents": "x\\ud800y\\u0000z"}}]]}',
            Hit("a", "x\ufffdy z", None),
        ),
        (b'{"result": [[{"document": {"id": "\\udfff", "contents": "b"}}]]}', Hit("\ufffd", "b", None)),
        (b'{"result": [[{"document": {"id": "a", "contents": "caf\xe9"}}]]}', Hit("a", "caf\ufffd", None)),
    ],
    ids=[
        "null", "NaN", "huge", "text", "number as id", "bare", "byte order mark", "surrogate", "id", "bytes",
    ],
)  # fmt: skip
async def test_only_the_text_of_a_passage_counts_and_odd_text_is_cleaned(scripted, answer, expected):
    url, answers, seen = scripted
    answers.append((200, answer, {}))
    async with RetrieverClient(url, timeout_seconds=5) as client:
        assert await client.retrieve(["q"], 3) == [[expected]]
    assert len(seen) == 1


async def test_the_encoding_that_a_server_names_is_used(scripted):
    url, answers, _ = scripted
    text = json.dumps({"result": [[hit("caf\u00e9")]]}, ensure_ascii=False)
    latin = (200, text.encode("latin-1"), {"content-type": "application/json; charset=iso-8859-1"})
    wrong = (200, text.encode(), {"content-type": "application/json; charset=base64"})
    answers += [latin, wrong]
    async with RetrieverClient(url, timeout_seconds=5) as client:
        for _ in range(2):
            assert await client.retrieve(["q"], 3) == [[Hit("a", "caf\u00e9", 1.5)]]


async def test_web_searches_without_ids_give_each_passage_one_of_its_own(scripted):
    url, answers, _ = scripted
    found = [{"document": {"contents": f'"Page {i % 2}"\ntext'}} for i in range(3)]
    answers.append((200, {"result": [found]}, {}))
    async with RetrieverClient(url, timeout_seconds=5) as client:
        first, second, again = (h.id for h in (await client.retrieve(["q"], 3))[0])
    assert first == again != second and first.startswith("text:")


async def test_one_bad_hit_of_many_fails_none_and_only_what_lacks_is_asked_again(scripted, caplog):
    url, answers, seen = scripted
    lists = [[hit(f"{i} {j}") for j in range(2)] for i in range(40)]
    lists[3][1], lists[7] = hit(None), [hit(None), hit(None)]
    answers += [(200, {"result": lists}, {}), (200, {"result": [[hit("7 0"), hit("7 1")]]}, {})]
    queries = [f"query {i}" for i in range(40)]
    async with RetrieverClient(url, timeout_seconds=20) as client:
        found = await client.retrieve(queries, 2)
        assert client.left_out == 1
    assert [h.contents for h in found[3]] == ["3 0"]
    assert all([h.contents for h in found[i]] == [f"{i} 0", f"{i} 1"] for i in range(40) if i != 3)
    assert [s["queries"] for s in seen] == [queries, ["query 7"]]
    assert "hits without text are left out" in caplog.text


async def test_a_search_without_a_match_stays_an_empty_list(scripted):
    url, answers, seen = scripted
    answers.append((200, {"result": [[]]}, {}))
    async with RetrieverClient(url, timeout_seconds=5) as client:
        assert await client.retrieve(["q"], 3) == [[]]
    assert len(seen) == 1


@pytest.mark.parametrize(("chars", "on_the_loop"), [(400_000, False), (200, True)])
async def test_a_long_answer_is_read_in_a_thread(scripted, monkeypatch, chars, on_the_loop):
    url, answers, _ = scripted
    body = json.dumps({"result": [[hit("\u00e9 " * (chars // 2)) for _ in range(30)]]}).encode()
    answers.append((200, gzip.compress(body, 1, mtime=0), {"content-encoding": "gzip"}))
    readers = []

    def read(*arguments):
        readers.append(threading.get_ident())
        return read_answer(*arguments)

    monkeypatch.setattr("retriever_service.client.read_answer", read)
    async with RetrieverClient(url, timeout_seconds=30) as client:
        (hits,) = await client.retrieve(["q"], 30)
    assert len(hits) == 30 and len(hits[0].contents) == chars
    assert [reader == threading.get_ident() for reader in readers] == [on_the_loop]


async def test_what_searches_wait_for_is_told_once_it_takes_long(scripted, monkeypatch):
    monkeypatch.setattr("retriever_service.client._LONG_SECONDS", 0.0)
    url, answers, _ = scripted
    answers.append((503, {"detail": "down"}, {}))
    async with RetrieverClient(url, timeout_seconds=5) as client:
        assert client.waits() == ""
        searches = [asyncio.create_task(client.retrieve(["q"], 3)) for _ in range(2)]
        async with asyncio.timeout(60):
            while "503 down" not in client.waits():
                await asyncio.sleep(0.01)
        assert client.waits().startswith(f"2 searches wait for the retriever at {url}, for up to ")
        for search in searches:
            search.cancel()
        await asyncio.gather(*searches, return_exceptions=True)
        assert client.waits() == ""


@pytest.mark.asyncio
async def test_a_search_whose_time_is_short_is_named_once_half_of_it_is_over():
    """One that ends before it has waited for ten seconds would never be named."""
    client = RetrieverClient("http://r", timeout_seconds=16)
    now = time.monotonic()
    client._searches[1] = (now, "503 down")
    assert client.waits() == ""
    client._searches[2] = (now - 9, "500 boom")
    said = client.waits()
    assert said.startswith("a search waits for the retriever at http://r, for up to ")
    assert said.endswith(" s: 500 boom")
    await client.aclose()


def test_an_answer_of_any_bytes_is_read_or_is_a_fault():
    import random

    draw, whole = random.Random(0), body([[hit("caf\u00e9"), hit("x")], [hit("y")]])
    for _ in range(3000):
        damaged = bytearray(whole)
        for _ in range(draw.randint(1, 6)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        answer = read_answer(bytes(damaged[: draw.randint(1, len(damaged))]), None, 2)
        assert len(answer.lists) == 2 and (answer.fault is None) == all(
            one is not None for one in answer.lists
        )
        for one in answer.lists:
            assert one is None or all(
                h.contents.encode() is not None and h.id.encode() is not None for h in one
            )


def test_json_of_a_stranger_is_read_leniently_and_refused_in_one_line():
    assert read_json(b'{"a": NaN}')["a"] != read_json(b'{"a": NaN}')["a"]
    assert clean_text("\ud83d\ude00 \ud83d") == "\U0001f600 \ufffd"
    with pytest.raises(ValueError, match=r"^not JSON .*'<a> <b>'$"):
        read_json(b"<a>\n<b>")
