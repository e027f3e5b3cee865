"""`unspiral serve likelihood` on a signal: what it holds is closed, and the exit status says which signal."""

import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import httpx
import psutil
import pytest

from services.likelihood.rest.server import THREADS

SERVER = """
import sys
from services.likelihood.rest import launch

open_store = launch.open_store
def noted(*args):
    store = open_store(*args)
    close = store.close
    store.close = lambda: (close(), print("closed", flush=True))
    return store
launch.open_store = noted
settings = launch.ServeSettings(store=sys.argv[1], port=0)
sys.exit(launch.serve_forever(settings, lambda line: print(line, flush=True)))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_store_is_closed_and_the_status_names_the_signal(tmp_path, number):
    store = tmp_path / "x.db"
    command = [sys.executable, "-c", SERVER, str(store)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": os.getcwd()}
    ) as server:
        try:
            assert server.stdout.readline().startswith("likelihood service: http://127.0.0.1:")
            assert server.stdout.readline() == f"likelihood service: {store} is new and empty\n"
            server.send_signal(number)
            out, _ = server.communicate(timeout=60)
        finally:
            server.kill()
    stopped = f"likelihood service: stopped by {signal.Signals(number).name}\n"
    assert (out, server.returncode) == (f"closed\n{stopped}", 128 + number)


def answer_of(connection: socket.socket) -> bytes:
    """All that the server still sends, until it closes the connection."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def test_requests_in_flight_are_answered_and_leave_no_traceback(tmp_path):
    command = [sys.executable, "-c", SERVER, str(tmp_path / "x.db")]
    env = os.environ | {"PYTHONPATH": os.getcwd()}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    ) as server:
        try:
            port = int(re.search(r"127\.0\.0\.1:(\d+)", server.stdout.readline())[1])
            with (
                socket.create_connection(("127.0.0.1", port), timeout=30) as upload,
                socket.create_connection(("127.0.0.1", port), timeout=30) as stream,
            ):
                stream.sendall(b"GET /v1/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert stream.recv(65536).startswith(b"HTTP/1.1 200")
                upload.sendall(
                    b"POST /v1/runs/r/steps HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{"
                )
                assert (
                    httpx.get(f"http://127.0.0.1:{port}/healthz", trust_env=False, timeout=30).status_code
                    == 200
                )
                server.send_signal(signal.SIGTERM)
                assert answer_of(upload).startswith(b"HTTP/1.1 503")
                answer_of(stream)
            _, log = server.communicate(timeout=60)
        finally:
            server.kill()
    assert server.returncode == 143
    assert "Traceback" not in log and "ASGI" not in log


def test_health_is_answered_while_every_thread_waits_for_the_store(tmp_path):
    command = [sys.executable, "-c", SERVER, str(tmp_path / "x.db")]
    env = os.environ | {"PYTHONPATH": os.getcwd()}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as server:
        try:
            url = re.search(r"http://[0-9.:]+", server.stdout.readline()).group()
            process = psutil.Process(server.pid)
            assert httpx.get(f"{url}/healthz", timeout=60).status_code == 200
            before = process.num_threads()
            with closing(sqlite3.connect(tmp_path / "x.db", isolation_level=None)) as held:
                held.execute("BEGIN IMMEDIATE")
                with ThreadPoolExecutor(2 * THREADS) as clients:
                    post = {"step": 0, "metrics": {"x": 1.0}}
                    sent = [
                        clients.submit(httpx.post, f"{url}/v1/runs/r{i}/steps", json=post, timeout=60)
                        for i in range(2 * THREADS)
                    ]
                    deadline = time.monotonic() + 60
                    while process.num_threads() < before + THREADS and time.monotonic() < deadline:
                        time.sleep(0.05)
                    assert httpx.get(f"{url}/healthz", timeout=60).json() == {"status": "ok"}
                    assert process.num_threads() == before + THREADS
                    held.execute("ROLLBACK")
                    assert {one.result(60).status_code for one in sent} == {200}
        finally:
            server.kill()
