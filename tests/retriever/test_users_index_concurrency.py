"""A search function of the user's, called for several queries at a time: over HTTP, as a run asks it."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from retriever_service.http.launch import serve_in_thread
from retriever_service.search.users_index import TRIAL, UsersIndex
from retriever_service.settings import ServerSettings
from services.common.errors import UserError


class Meeting:
    """Calls that wait for each other: none returns before `parties` are at work."""

    def __init__(self, parties):
        self.parties = parties
        self.barrier = threading.Barrier(parties, timeout=30)
        self.threads = set()
        self.arrived = 0

    def search(self, query, topk):
        if query != TRIAL:
            self.threads.add(threading.current_thread().name)
            self.barrier.wait()
        return [(f"{query}\nText of {query}.", 1.0)]


met = Meeting(1)
hangs = threading.Event()
begun = threading.Event()


def meeting(query, topk):
    return met.search(query, topk)


async def awaiting(query, topk):
    if query != TRIAL:
        met.threads.add(threading.current_thread().name)
        met.arrived += 1
        while met.arrived < met.parties:
            await asyncio.sleep(0.01)
    return [(f"{query}\nText of {query}.", 1.0)]


def odd_ones_fail(query, topk):
    counted.append(query)
    if query.isdigit() and int(query) % 2:
        raise ConnectionError(f"no server for {query}")
    return [(f"{query}\nText.", 1.0)]


counted: list[str] = []


def hanging(query, topk):
    counted.append(query)
    if query == "hang":
        begun.set()
        hangs.wait(60)
    return [(f"{query}\nText.", 1.0)]


async def cancelled(query, topk):
    task = asyncio.create_task(asyncio.sleep(60))
    task.cancel()
    await task


def served(path, **settings):
    return serve_in_thread(ServerSettings(index=f"{__name__}:{path}", port=0, **settings))


def titles(answer):
    return [hits[0]["document"]["contents"].partition("\n")[0] for hits in answer.json()["result"]]


def ask(server, *queries):
    body = {"queries": list(queries), "topk": 1, "return_scores": True}
    return httpx.post(f"{server.url}/retrieve", json=body, timeout=60, trust_env=False)


def wait_for(server, queued):
    """Until so many queries wait or are searched."""
    deadline = time.monotonic() + 60
    while f"retriever_queued_queries {queued}.0" not in metrics(server):
        assert time.monotonic() < deadline, metrics(server)


def metrics(server):
    return httpx.get(f"{server.url}/metrics", trust_env=False).text


@pytest.mark.parametrize("path", ["meeting", "awaiting"])
def test_requests_of_several_clients_are_searched_at_the_same_time(monkeypatch, path):
    """Each call waits for seven others: were one made after another, none would return."""
    monkeypatch.setitem(globals(), "met", Meeting(8))
    server = served(path, concurrency=8)
    try:
        with ThreadPoolExecutor(8) as clients:
            answers = list(clients.map(lambda n: ask(server, f"q{n}"), range(8)))
        assert [titles(one) for one in answers] == [[f"q{n}"] for n in range(8)]
        assert len(met.threads) == (1 if path == "awaiting" else 8), (
            "an async function is awaited on one loop"
        )
    finally:
        server.stop()


def test_queries_of_one_request_keep_their_order_and_by_default_one_thread(monkeypatch):
    monkeypatch.setitem(globals(), "met", Meeting(1))
    index = UsersIndex(f"{__name__}:meeting")
    found = index.search([f"q{n}" for n in range(20)] + [" "], 1)
    assert [hits[0][0].partition(b"\\n")[0].rpartition(b'"')[2] for hits in found[:20]] == [
        f"q{n}".encode() for n in range(20)
    ]
    assert found[20] == [] and len(met.threads) == 1
    index.close()


def test_a_query_that_fails_fails_its_request_alone_and_no_other_is_asked_again():
    counted.clear()
    server = served("odd_ones_fail", concurrency=4)
    try:
        with ThreadPoolExecutor(4) as clients:
            answers = list(clients.map(lambda n: ask(server, str(n)), range(4)))
        assert [one.status_code for one in answers] == [200, 500, 200, 500]
        assert "ConnectionError: no server for 3" in answers[3].json()["detail"]
        assert __file__ in answers[3].json()["detail"]
        assert sorted(counted) == ["0", "1", "2", "3", TRIAL]
    finally:
        server.stop()


def test_a_call_that_has_not_returned_holds_up_no_other_request():
    """A batch would be answered, and the next one begin, once its longest call has returned."""
    hangs.clear()
    begun.clear()
    server = served("hanging", concurrency=2)
    try:
        with ThreadPoolExecutor(1) as client:
            longest = client.submit(ask, server, "hang")
            assert begun.wait(60)
            assert [titles(ask(server, f"q{n}")) for n in range(6)] == [[f"q{n}"] for n in range(6)]
            assert titles(ask(server, *"abcdef")) == list("abcdef")
            assert not longest.done()
            hangs.set()
            assert titles(longest.result()) == ["hang"]
    finally:
        hangs.set()
        server.stop()


@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_call_that_is_late_is_told_and_another_thread_takes_its_place(concurrency):
    hangs.clear()
    server = served("hanging", concurrency=concurrency, request_timeout_seconds=1.0)
    try:
        with ThreadPoolExecutor(2) as clients:
            answers = list(clients.map(lambda _: ask(server, "hang"), range(2)))
        assert [one.status_code for one in answers] == [504, 504]
        deadline = time.monotonic() + 60
        while (answer := ask(server, "later")).status_code != 200:  # the place is given just after the answer
            assert time.monotonic() < deadline
        assert titles(answer) == ["later"]
    finally:
        hangs.set()
        server.stop()


def test_what_several_ask_for_at_the_same_time_is_called_once():
    hangs.clear()
    begun.clear()
    counted.clear()
    server = served("hanging", cache_size=0)
    try:
        with ThreadPoolExecutor(8) as clients:
            asked = [clients.submit(ask, server, "hang") for _ in range(4)]
            assert begun.wait(60)
            asked += [clients.submit(ask, server, "same") for _ in range(4)]
            wait_for(server, 8)
            hangs.set()
            assert [titles(one.result()) for one in asked] == [["hang"]] * 4 + [["same"]] * 4
        assert counted == [TRIAL, "hang", "same"]
    finally:
        hangs.set()
        server.stop()


def test_a_long_request_does_not_keep_a_short_one_waiting_for_all_of_it():
    hangs.clear()
    begun.clear()
    counted.clear()
    server = served("hanging")
    try:
        with ThreadPoolExecutor(2) as clients:
            long = clients.submit(ask, server, "hang", *(f"long{n}" for n in range(50)))
            assert begun.wait(60)
            short = clients.submit(ask, server, "short")
            wait_for(server, 52)
            hangs.set()
            assert titles(short.result()) == ["short"]
            assert len(titles(long.result())) == 51
        assert counted.index("short") <= 3
    finally:
        hangs.set()
        server.stop()


def test_a_search_whose_own_task_was_cancelled_has_failed():
    index = UsersIndex(f"{__name__}:cancelled")
    try:
        with pytest.raises(UserError, match="RuntimeError: cancelled"):
            index.search(["a"], 1)
    finally:
        index.close()


def test_a_call_that_hangs_costs_its_thread_and_no_other_search():
    hangs.clear()
    index = UsersIndex(f"{__name__}:hanging", concurrency=2, timeout_seconds=0.5)
    try:
        with pytest.raises(UserError) as failed:
            index.search(["a", "hang"], 1)
        assert str(failed.value) == f"index {__name__}:hanging: no result within 0.5 s"
        # Both places are there still.
        assert [len(hits) for hits in index.search(["b", "c", "d"], 1)] == [1, 1, 1]
        with pytest.raises(UserError, match=r"no result within 0\.5 s"):
            index.search(["hang"], 1)
        assert [len(hits) for hits in index.search(["e"], 1)] == [1]
    finally:
        hangs.set()
        index.close()


def test_a_call_that_hangs_keeps_no_process_from_its_end():
    code = (
        "import test_users_index_concurrency as t\n"
        "from retriever_service.search.users_index import UsersIndex\n"
        "index = UsersIndex('test_users_index_concurrency:hanging', timeout_seconds=0.2)\n"
        "try:\n    index.search(['hang'], 1)\nexcept Exception as e:\n    print(e)\n"
    )
    path = os.pathsep.join([os.getcwd(), os.path.dirname(__file__)])
    began = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=55,
    )
    assert ended.returncode == 0 and ended.stdout.endswith("no result within 0.2 s\n"), ended.stderr
    assert time.monotonic() - began < 55, "the call itself lasts a minute"
