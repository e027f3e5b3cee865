"""Clients that stop others: endless heads, requests that never end, connections that nobody uses. By raw
sockets, for each service."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time

import psutil
import pytest

from services.common.http.connections import Limits
from tests.common.gate_services import NAMES, POSTS, Served, read_all, serving
from tests.retriever.retriever_fixtures import small_index  # noqa: F401

HEAD = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module", params=NAMES)
def hasty(request, tmp_path_factory, small_index):
    """A service with little patience."""
    limits = Limits(head_seconds=1.0, body_seconds=1.0, connections=40)
    with serving(request.param, tmp_path_factory.mktemp("hasty"), small_index, limits=limits) as served:
        yield served


@pytest.fixture(scope="module", params=NAMES)
def patient(request, tmp_path_factory, small_index):
    """A service that gives nobody up while a busy machine keeps its client from sending."""
    with serving(
        request.param, tmp_path_factory.mktemp("patient"), small_index, limits=Limits(connections=40)
    ) as served:
        yield served


@contextlib.contextmanager
def health_watched(served: Served):
    """A list that gets the seconds of each answer to a health check, asked for all along."""
    seconds: list[float] = []
    done, first = threading.Event(), threading.Event()

    def ask():
        with served.client() as client:
            while not done.is_set():
                began = time.monotonic()
                assert client.get("/healthz").status_code == 200
                seconds.append(time.monotonic() - began)
                first.set()
                done.wait(0.02)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        assert first.wait(60)
        yield seconds
    finally:
        done.set()
        thread.join(60)


@pytest.mark.parametrize(
    "start",
    [
        HEAD + b"X: ",
        HEAD,
        b"GET /",
        HEAD.replace(b"GET", b"POST") + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: ",
    ],
    ids=["one header", "many headers", "the path", "a trailer"],
)
def test_an_endless_head_ends_at_64_kib_and_holds_up_nobody(patient, start):
    piece = b"a: b\r\n" * 10_000 if start == HEAD else b"a" * 60_000
    sent, memory = 0, psutil.Process().memory_info().rss
    with (
        health_watched(patient) as seconds,
        socket.create_connection(("127.0.0.1", patient.port), timeout=60) as s,
    ):
        s.sendall(start)
        with contextlib.suppress(ConnectionError, TimeoutError):
            while sent < 100 << 20:
                s.sendall(piece)
                sent += len(piece)
        answer = read_all(s)
    assert sent < 100 << 20 and max(seconds) < 20
    assert psutil.Process().memory_info().rss - memory < 100 << 20
    assert answer[:12] in (
        b"HTTP/1.1 431",
        b"HTTP/1.1 405",
        b"",
    )  # /healthz takes no post; the last by a reset


def test_a_head_of_64_kib_is_refused_by_name_and_a_smaller_one_is_answered(patient):
    large = patient.raw(HEAD + b"X: " + b"a" * 70_000 + b"\r\n\r\n")
    assert (
        large.startswith(b"HTTP/1.1 431 ") and b"head: more than the 65536 bytes that are accepted" in large
    )
    small = patient.raw(HEAD + b"Connection: close\r\nX: " + b"a" * 60_000 + b"\r\n\r\n")
    assert small.startswith(b"HTTP/1.1 200 ")


@pytest.mark.slow
def test_a_head_that_does_not_come_is_given_up_in_time(hasty):
    began = time.monotonic()
    assert hasty.raw(HEAD).startswith(b"HTTP/1.1 408 ")
    assert hasty.raw() == b""  # a connection that nothing was asked on ends without a word
    with socket.create_connection(
        ("127.0.0.1", hasty.port), timeout=60
    ) as s:  # a byte now and then does not help
        with contextlib.suppress(ConnectionError):
            for byte in HEAD * 20:
                s.sendall(bytes([byte]))
                time.sleep(0.05)
        assert read_all(s)[:13] in (b"HTTP/1.1 408 ", b"")
    assert time.monotonic() - began < 20


def test_a_body_that_does_not_come_is_given_up_in_time_and_the_next_is_served(hasty, caplog):
    path, _ = POSTS[hasty.name]
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        "Content-Length: 500\r\n\r\n"
    )
    answer = hasty.raw(head.encode() + b'{"step"')
    assert answer.startswith(b"HTTP/1.1 408 ") and b"body: it did not come whole within 1 s" in answer
    with hasty.client() as client:
        assert hasty.post(client).status_code == 200
    assert not caplog.records


def test_a_client_that_leaves_in_the_middle_of_a_body_leaves_no_line_in_the_log(patient, caplog):
    caplog.set_level(logging.INFO)
    path, _ = POSTS[patient.name]
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", patient.port), timeout=60) as s:
            s.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n{{".encode())
    with patient.client() as client:
        assert patient.post(client).status_code == 200
    assert [r.getMessage() for r in caplog.records if r.name != "httpx"] == []


def test_what_is_no_http_is_a_400_in_json_and_no_line_in_the_log(patient, caplog):
    for junk in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"HELLO\r\n\r\n",
        HEAD + b"Content-Length: x\r\n\r\n",
    ):
        answer = patient.raw(junk)
        assert answer.startswith(b"HTTP/1.1 400 ") and b'{"detail":' in answer, junk
    upgrade = patient.head_of_answer(HEAD + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
    assert upgrade.startswith(b"HTTP/1.1 200 ")
    assert not caplog.records


def test_a_length_of_thousands_of_zeros_is_read_as_the_number_it_is(patient, caplog):
    path, body = POSTS[patient.name]
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    )
    for size, says in ((len(body), b" 200 "), (1 << 40, b" 413 ")):
        answer = patient.raw(f"{head}Content-Length: {size:05000d}\r\n\r\n".encode() + body)
        assert answer.startswith(b"HTTP/1.1" + says), answer[:200]
    assert not caplog.records


def test_an_upgrade_whose_body_no_parser_reads_is_refused_and_one_without_is_answered(patient, caplog):
    path, body = POSTS[patient.name]
    body = body or b" "
    upgrade = (
        "Host: localhost\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
        "HTTP2-Settings: AAMAAABk\r\n"
    )
    for length in (f"Content-Length: {len(body)}", "Transfer-Encoding: chunked"):
        answer = patient.raw(f"POST {path} HTTP/1.1\r\n{upgrade}{length}\r\n\r\n".encode() + body)
        assert answer.startswith(b"HTTP/1.1 400 ") and b"Upgrade with a body" in answer
    answer = patient.head_of_answer(f"GET /healthz HTTP/1.1\r\n{upgrade}\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 200 ")
    for head in (upgrade, "Host: localhost\r\n"):
        large = patient.raw(f"GET / HTTP/1.1\r\n{head}X: {'x' * 70_000}\r\n\r\n".encode())
        assert large.startswith(b"HTTP/1.1 431 ")
    assert not caplog.records


def test_idle_connections_make_room_for_those_that_ask(patient):
    with contextlib.ExitStack() as held, patient.client() as client:
        idle = [
            held.enter_context(socket.create_connection(("127.0.0.1", patient.port), timeout=60))
            for _ in range(120)
        ]
        for s in idle[:3]:
            s.sendall(HEAD + b"\r\n")
        assert patient.post(client).status_code == 200
        here = psutil.Process().net_connections()
        taken = [c for c in here if c.status == "ESTABLISHED" and c.laddr.port == patient.port]
        assert len(taken) <= 41


def test_where_all_connections_are_at_work_a_further_one_gets_a_503(tmp_path, small_index):
    with (
        serving("likelihood", tmp_path, small_index, limits=Limits(connections=2)) as served,
        served.client() as client,
    ):
        served.post(client)
        stream = b"GET /v1/stream HTTP/1.1\r\nHost: localhost\r\n\r\n"
        with contextlib.ExitStack() as held:
            client.close()
            for _ in range(2):
                s = held.enter_context(socket.create_connection(("127.0.0.1", served.port), timeout=60))
                s.sendall(stream)
                assert s.recv(65536).startswith(b"HTTP/1.1 200 ")
            answer = served.raw(HEAD + b"\r\n")
        assert answer.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in answer


def test_a_client_that_does_not_read_its_answer_is_given_up(tmp_path, small_index):
    limits = Limits(head_seconds=2.0)
    with serving("likelihood", tmp_path, small_index, limits=limits) as served, served.client() as client:
        names = {f"m{i}" + "x" * 150: float(i) for i in range(1900)}
        for n in range(30):
            assert client.post("/v1/runs/run/steps", json={"step": n, "metrics": names}).status_code == 200
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            s.settimeout(30)
            s.connect(("127.0.0.1", served.port))
            s.sendall(b"GET /v1/runs/run/steps?limit=30 HTTP/1.1\r\nHost: localhost\r\n\r\n")
            until = time.monotonic() + 30

            def open_ones() -> int:
                mine = s.getsockname()[1]
                return sum(
                    c.laddr.port == served.port and c.raddr and c.raddr.port == mine for c in connections()
                )

            while open_ones():
                assert time.monotonic() < until, "the server still holds the answer"
                time.sleep(0.1)


def connections():
    return [c for c in psutil.Process().net_connections("tcp") if c.status == "ESTABLISHED"]
