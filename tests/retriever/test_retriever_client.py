"""The client: patient with outages, never silent about them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time

import pytest
from made_server import Quiet, serving
from ports import kept_port

from retriever_service.client import Hit, RetrieverClient
from retriever_service.errors import RetrieverUnavailable
from retriever_service.http.launch import serve_in_thread
from retriever_service.settings import ServerSettings
from services.common.errors import UserError
from tests.retriever.retriever_fixtures import server, small_index  # noqa: F401


@contextlib.contextmanager
def scripted_server():
    """A server that answers with the (status, body, headers) of a list, one after the other, the last one for
    ever."""
    answers, seen = [], []

    class Handler(Quiet):
        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            seen.append(json.loads(body) if body.startswith(b"{") else body)
            status, body, headers = answers[min(len(seen), len(answers)) - 1]
            payload = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.answer(status, payload, headers)

        do_GET = do_PUT = do_POST

    with serving(Handler) as url:
        yield url, answers, seen


@pytest.fixture
def scripted():
    with scripted_server() as made:
        yield made


ONE = {"result": [[{"document": {"id": "a", "contents": "b"}, "score": 1.5}]]}


async def test_hits_come_in_the_order_of_the_queries(server):
    async with RetrieverClient(server.url) as client:
        first, blank, second = await client.retrieve(["Mina Frost", " ", "Dove river"], 2)
        assert (
            first[0].id == "d59"
            and isinstance(first[0], Hit)
            and first[0].contents.startswith('"Mina Frost"\n')
        )
        assert blank == [] and second[0].id == "d19" and second[0].score > second[1].score
        assert await client.retrieve([], 3) == []


async def test_whatever_a_model_writes_is_a_query(server):
    async with RetrieverClient(server.url) as client:
        (hits, long) = await client.retrieve(["Mina\0Frost \ud800", "Dove " * 50_000], 1)
        assert hits[0].id == "d59" and long[0].id == "d19"


@pytest.mark.parametrize("status", [404, 405, 501])
async def test_a_server_without_a_health_route_is_ready(status):
    class Handler(Quiet):
        def do_GET(self):
            self.answer(status, b"")

    with serving(Handler) as url:
        async with RetrieverClient(url) as client:
            await client.wait_ready(1.0)


async def test_transient_failures_are_retried_until_an_answer_comes(scripted):
    url, answers, seen = scripted
    answers += [
        (503, {"detail": "full"}, {"retry-after": "0"}),
        (429, {}, {}),
        (500, b"<html>", {}),
        (502, b"", {}),
        (200, ONE, {}),
    ]
    async with RetrieverClient(url, timeout_seconds=20) as client:
        assert await client.retrieve(["q"], 3) == [[Hit("a", "b", 1.5)]]
    assert len(seen) == 5 and seen[0] == {"queries": ["q"], "topk": 3, "return_scores": True}


async def test_retry_after_is_kept(scripted):
    url, answers, _ = scripted
    answers += [(503, {"detail": "full"}, {"retry-after": "1"}), (200, ONE, {})]
    started = time.monotonic()
    async with RetrieverClient(url, timeout_seconds=20) as client:
        await client.retrieve(["q"], 3)
    assert time.monotonic() - started >= 1


async def test_an_outage_ends_in_an_error_that_names_the_address_never_in_an_empty_result(scripted):
    url, answers, seen = scripted
    answers += [(500, {"detail": "broken"}, {})]
    async with RetrieverClient(url, timeout_seconds=1) as client:
        with pytest.raises(
            RetrieverUnavailable, match=rf"{url}: no answer within 1 s \(\d+ tries\): 500 broken"
        ) as error:
            await client.retrieve(["q"], 3)
    assert error.value.exit_code == 3 and len(seen) > 1
    async with RetrieverClient(f"http://127.0.0.1:{kept_port()}", timeout_seconds=0.5) as client:
        with pytest.raises(RetrieverUnavailable, match="no answer within"):
            await client.retrieve(["q"], 3)


async def test_the_last_answer_is_the_reason_where_the_time_ends_within_a_later_try():
    asked = 0

    async def answer_once(reader, writer):
        nonlocal asked
        asked += 1
        await reader.readuntil(b"\r\n\r\n")
        if asked == 1:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\nconnection: close\r\n\r\n<p>Hi</p>")
            await writer.drain()
        else:
            await reader.read()
        writer.close()

    async with await asyncio.start_server(answer_once, "127.0.0.1", 0) as odd:
        url = f"http://127.0.0.1:{odd.sockets[0].getsockname()[1]}"
        async with RetrieverClient(url, timeout_seconds=3) as client:
            with pytest.raises(
                RetrieverUnavailable,
                match=rf"{url}: no usable answer within 3 s \(2 tries\): .*not JSON .*'<p>Hi</p>'",
            ):
                await client.retrieve(["q"], 3)


@pytest.mark.parametrize(
    ("status", "detail"), [(400, "bad"), (403, "no"), (413, "too long"), (422, "topk: too many")]
)
async def test_a_refused_request_is_an_error_at_once(scripted, status, detail):
    url, answers, seen = scripted
    answers.append((status, {"detail": detail}, {}))
    asked = "" if status == 403 else r" \(to the query 'q'\)"
    async with RetrieverClient(url, timeout_seconds=5) as client:
        with pytest.raises(UserError, match=f"^retriever at {url}: {status} {detail}{asked}$"):
            await client.retrieve(["q"], 3)
    assert len(seen) == 1


async def test_a_refusal_shows_the_beginning_of_the_first_query(scripted):
    url, answers, _ = scripted
    answers.append((400, {"detail": "bad syntax"}, {}))
    async with RetrieverClient(url, timeout_seconds=5) as client:
        with pytest.raises(UserError) as e:
            await client.retrieve(["title:(" + "x" * 200, "q"], 3)
    assert str(e.value) == (
        f"retriever at {url}: 400 bad syntax (to the query 'title:({'x' * 93}' and 1 more)"
    )


@pytest.mark.parametrize("status", [401, 403])
async def test_a_server_that_has_answered_and_bars_is_tried_again(scripted, status):
    url, answers, seen = scripted
    barred = (status, {"detail": "no"}, {})
    answers += [(200, ONE, {}), barred, barred, (200, ONE, {})]
    async with RetrieverClient(url, timeout_seconds=60) as client:
        first = await client.retrieve(["q"], 3)
        assert len(seen) == 1 and await client.retrieve(["q"], 3) == first
    assert len(seen) == 4


async def test_the_deadline_bounds_the_whole_request_also_where_the_answer_trickles_in():
    async def trickle(reader, writer):
        await reader.read(100)
        try:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
            for _ in range(600):
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.1)
        except ConnectionError:
            pass
        writer.close()

    async with await asyncio.start_server(trickle, "127.0.0.1", 0) as slow:
        url = f"http://127.0.0.1:{slow.sockets[0].getsockname()[1]}"
        async with RetrieverClient(url, timeout_seconds=2) as client:
            started = time.monotonic()
            with pytest.raises(
                RetrieverUnavailable,
                match=rf"{url}: no answer within 2 s \(1 tries\): no whole answer within",
            ):
                await client.retrieve(["q"], 3)
            with pytest.raises(
                RetrieverUnavailable, match=r"not ready after 2 s: /readyz: no whole answer within"
            ):
                await client.wait_ready(2)
            assert time.monotonic() - started < 40  # of the 60 s that the answer takes


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        "ftp://x:1",
        "x",
        "",
        "http://",
        "http:///a",
        "http://[::1",
        "http://x:99999",
        "http://x:0",
        "http://x\n",
    ],
)
def test_a_url_that_is_none_is_refused_at_once_in_one_line_that_says_what_is_accepted(url):
    with pytest.raises(UserError) as error:
        RetrieverClient(url)
    line = str(error.value)
    assert (
        error.value.exit_code == 2
        and line.startswith(f"retriever url {url!r}: ")
        and "http://HOST:PORT" in line
    )
    assert "\n" not in line


@pytest.mark.parametrize(
    ("token", "named"),
    [
        ("s3cret\nx", "character 7 is U+000A"),
        ("s3cr\u0119t", "character 5 is U+0119"),
        ("s3cret ", "ends with a space"),
    ],
)
def test_a_token_that_no_header_can_carry_is_refused_at_once_and_not_shown(token, named):
    with pytest.raises(UserError, match=r"^retriever token: ") as error:
        RetrieverClient("http://127.0.0.1:1", token=token)
    line = str(error.value)
    assert error.value.exit_code == 2 and named in line and "printable ASCII" in line
    assert "s3c" not in line and "\n" not in line


async def test_wait_ready_tells_then_gives_up_naming_the_address():
    url, told = f"http://127.0.0.1:{kept_port()}", []
    async with RetrieverClient(url) as client:
        with pytest.raises(RetrieverUnavailable, match=f"{url}: not ready after 0.6 s") as error:
            await client.wait_ready(0.6, told.append)
    assert error.value.exit_code == 3 and len(told) == 1 and url in told[0]


async def test_a_retriever_that_comes_up_late_or_restarts_is_waited_for(small_index):
    settings = ServerSettings(index=str(small_index), port=kept_port())
    async with RetrieverClient(f"http://127.0.0.1:{settings.port}", timeout_seconds=30) as client:
        waiting = asyncio.create_task(client.wait_ready(30))
        await asyncio.sleep(0.3)
        first = await asyncio.to_thread(serve_in_thread, settings)
        await waiting
        assert (await client.retrieve(["Mina Frost"], 1))[0][0].id == "d59"
        await asyncio.to_thread(first.stop)
        pending = asyncio.create_task(client.retrieve(["Dove river"], 1))
        await asyncio.sleep(0.5)
        assert not pending.done()
        second = await asyncio.to_thread(serve_in_thread, settings)
        assert (await pending)[0][0].id == "d19"
        await asyncio.to_thread(second.stop)


async def test_the_token_is_sent(small_index):
    with serve_in_thread(ServerSettings(index=str(small_index), port=0, token="s3cret")) as guarded:
        async with RetrieverClient(guarded.url, token="s3cret") as client:
            assert len(await client.retrieve(["river"], 2)) == 1
        async with RetrieverClient(guarded.url) as client:
            with pytest.raises(UserError, match="401 a token is needed"):
                await client.retrieve(["river"], 2)


async def test_a_deadline_that_comes_while_the_loop_is_held_up_in_a_connect_is_kept(monkeypatch):
    """anyio's own time for a connection (0.25 s) and the search's end in the same turn of the loop."""
    loop, connecting, held_up = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    connect = loop.create_connection

    async def late(*args, **kwargs):
        connecting.set()
        await held_up.wait()
        return await connect(*args, **kwargs)

    async def say_nothing(reader, writer):
        await reader.read()
        writer.close()

    monkeypatch.setattr(loop, "create_connection", late)
    async with (
        await asyncio.start_server(say_nothing, "127.0.0.1", 0) as silent,
        RetrieverClient(
            f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}", timeout_seconds=0.5
        ) as client,
    ):
        search = asyncio.create_task(client.retrieve(["a"], 3))
        await connecting.wait()
        loop.call_soon(time.sleep, 0.6)
        loop.call_later(0.6, held_up.set)
        done, _ = await asyncio.wait({search}, timeout=20)
        search.cancel()
        assert done and isinstance(search.exception(), RetrieverUnavailable)


@pytest.mark.slow
async def test_a_thousand_that_wait_for_a_silent_retriever_keep_their_deadline():
    """They wait for connections without holding up the loop, and are answered once it answers."""
    speaks, answer = asyncio.Event(), b'{"result":[[]]}'

    async def talk(reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                await reader.readexactly(int(re.search(rb"content-length: (\d+)", head.lower())[1]))
                await speaks.wait()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(answer), answer))
        writer.close()

    silent = await asyncio.start_server(talk, "127.0.0.1", 0, backlog=2048)
    async with (
        silent,
        RetrieverClient(
            f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}", timeout_seconds=0.3
        ) as client,
    ):
        began = time.monotonic()
        failures = await asyncio.gather(
            *(client.retrieve(["a"], 3) for _ in range(1000)), return_exceptions=True
        )
        assert time.monotonic() - began < 120 and {type(f) for f in failures} == {RetrieverUnavailable}
        speaks.set()
        client.timeout_seconds = 120
        assert await asyncio.gather(*(client.retrieve(["a"], 3) for _ in range(300))) == [[[]]] * 300


@pytest.mark.parametrize("place", ["https://search.made/retrieve", "/retrieve/"])
async def test_a_redirect_is_refused_and_named(scripted, place):
    url, answers, seen = scripted
    answers.append((307, b"", {"location": place}))
    async with RetrieverClient(url) as client:
        with pytest.raises(UserError) as error:
            await client.retrieve(["a"], 1)
    assert str(error.value) == (
        f"retriever at {url}: 307 sends on to {place}, which is not followed (to the query 'a')"
    )
    assert len(seen) == 1
