"""A server that is stopped while it searches, while it loads, with one process and with several: bounded, and
no request without its JSON."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from places import ROOT

from tests.retriever.retriever_fixtures import small_index  # noqa: F401

SCRIPT = """
import ctypes, sys, time
from retriever_service.http import launch
from retriever_service.search import backends, index
from retriever_service.settings import ServerSettings

class Slow(index.Index):
    def __init__(self, *args, **named):
        if "loading" in sys.argv[1]:
            time.sleep(300)
        if "holding" in sys.argv[1]:
            ctypes.PyDLL(None).sleep(7)  # without giving the interpreter lock away
        super().__init__(*args, **named)
        self.quick = False

    def search(self, queries, topk):
        time.sleep(max([float(q.split()[1]) for q in queries if q.startswith("sleep ")], default=0))
        return super().search(queries, topk)

backends.Index = Slow
if __name__ == "__main__":
    workers, drain = int(sys.argv[3]), float(sys.argv[4])
    settings = ServerSettings(index=sys.argv[2], workers=workers, drain_seconds=drain, port=0)
    sys.exit(launch.run(settings, lambda url, what: print(url, flush=True)))
"""


@contextlib.contextmanager
def serving(folder: Path, index: Path, workers: int, drain: float, kind: str = ""):
    """(process, address) of a server whose search for `sleep N` takes N seconds."""
    script = folder / "slow.py"  # a file, because workers import the main module anew
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), kind, str(index), str(workers), str(drain)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def wait_ready(url: str, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/readyz", trust_env=False, timeout=60).status_code == 200:
                return
        time.sleep(0.05)
    raise TimeoutError(url)


def ask(url: str, query: str, **headers: str) -> httpx.Response:
    return httpx.post(f"{url}/retrieve", json={"query": query}, headers=headers, trust_env=False, timeout=60)


def wait_in_flight(url: str, queries: int, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while (
        f"retriever_queued_queries {queries}.0"
        not in httpx.get(f"{url}/metrics", trust_env=False, timeout=60).text
    ):
        assert time.monotonic() < until
        time.sleep(0.05)


def workers(process: subprocess.Popen) -> set[int]:
    """Those that live."""
    found = set()
    for child in psutil.Process(process.pid).children():
        with contextlib.suppress(psutil.Error):  # a zombie has no command line
            if "spawn_main" in " ".join(child.cmdline()):
                found.add(child.pid)
    return found


WORKERS = [1, pytest.param(2, marks=pytest.mark.chaos)]


@pytest.mark.parametrize("workers", WORKERS)
def test_what_the_drain_does_not_wait_for_gets_a_503_in_json_and_the_process_ends(
    small_index, tmp_path, workers
):
    with serving(tmp_path, small_index, workers, 1) as (process, url), ThreadPoolExecutor(1) as pool:
        wait_ready(url)
        waiting = pool.submit(ask, url, "sleep 300")
        wait_in_flight(url, 1)
        process.send_signal(signal.SIGTERM)
        answer = waiting.result()
        assert (answer.status_code, answer.headers["content-type"], answer.headers["retry-after"]) == (
            503,
            "application/json",
            "1",
        )
        assert answer.json() == {"detail": "the server is stopping", "field": None, "limit": None}
        assert process.wait(60) == 143 and "Traceback" not in process.stderr.read()


@pytest.mark.parametrize("workers", WORKERS)
def test_a_stop_does_not_wait_for_an_index_that_still_loads(small_index, tmp_path, workers):
    with serving(tmp_path, small_index, workers, 0.1, "loading") as (process, url):
        if workers == 1:
            while httpx.get(f"{url}/healthz", trust_env=False, timeout=60).status_code != 200:
                time.sleep(0.05)
        else:  # they listen once they have loaded; the time is for their imports
            time.sleep(2.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143 and "Traceback" not in process.stderr.read()


@pytest.mark.chaos
def test_workers_keep_deadlines_answer_what_is_in_flight_and_take_nothing_new(small_index, tmp_path):
    with serving(tmp_path, small_index, 2, 20) as (process, url), ThreadPoolExecutor(8) as pool:
        wait_ready(url)
        began = time.monotonic()
        late = list(pool.map(lambda i: ask(url, f"sleep 8 {i}", **{"x-timeout-seconds": "0.3"}), range(8)))
        assert {a.status_code for a in late} == {504} and time.monotonic() - began < 7.5
        assert all("no answer within 0." in a.json()["detail"] for a in late)
        in_flight = [pool.submit(ask, url, f"sleep {4 + i / 8} Mina Frost") for i in range(4)]
        wait_in_flight(url, 4)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(ConnectionRefusedError):
            while True:  # uvicorn's supervisor looks twice a second
                socket.create_connection(("127.0.0.1", httpx.URL(url).port), 5).close()
                time.sleep(0.1)
        assert not any(f.done() for f in in_flight)
        assert [f.result().json()["result"][0][0]["id"] for f in in_flight] == ["d59"] * 4
        assert process.wait(30) == 143 and "Traceback" not in process.stderr.read()


@pytest.mark.chaos
def test_a_worker_that_does_not_move_holds_up_neither_its_successor_nor_a_stop(small_index, tmp_path):
    def stopped() -> psutil.Process:
        worker = psutil.Process(min(workers(process)))
        worker.send_signal(signal.SIGSTOP)
        time.sleep(1.5)  # the supervisor has asked it for a sign of life
        return worker

    with serving(tmp_path, small_index, 2, 1) as (process, url):
        wait_ready(url)
        dead, began = stopped(), time.monotonic()
        dead.kill()
        while len(workers(process)) < 2:
            time.sleep(0.05)
        assert time.monotonic() - began < 20
        stuck = stopped()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143 and not stuck.is_running()


@pytest.mark.chaos
def test_a_worker_that_is_busy_loading_is_not_taken_for_dead(small_index, tmp_path):
    """As the vocabulary of a large index keeps it: uvicorn gives a worker 5 s to answer, and starts another
    that does not either."""
    with serving(tmp_path, small_index, 2, 1, "holding") as (process, url):
        while len(first := workers(process)) < 2:
            time.sleep(0.05)
        wait_ready(url, 30)
        assert workers(process) == first
        assert ask(url, "Mina Frost").json()["result"][0][0]["id"] == "d59"
