"""Servers of the retriever as processes, and a load of requests that runs beside what a test does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

import httpx
from places import ROOT

SECONDS = 120.0
"""Longest wait for anything."""


def wait_for(what: Callable[[], object], said: str) -> None:
    until = time.monotonic() + SECONDS
    while not what():
        assert time.monotonic() < until, f"no {said} within {SECONDS:g} s"
        time.sleep(0.02)


def line_of_ready(output: IO[str]) -> str:
    """The line behind those that a server which loads for long prints every 15 s."""
    while (line := output.readline()).startswith("retriever: still loading "):
        pass
    return line


class Served:
    """A server in a process of its own."""

    def __init__(self, *words: object, port: int = 0) -> None:
        command = [sys.executable, "-m", "retriever_service", "serve", *map(str, words), "--port", str(port)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        self.lines: list[str] = []
        self._errors = threading.Thread(target=self._read, daemon=True)
        self._errors.start()
        loading = self.process.stdout.readline()
        assert "loading" in loading, self.lines
        self.url = loading.split()[-1]
        self.port = int(self.url.rpartition(":")[2])

    def _read(self) -> None:
        self.lines += iter(self.process.stderr.readline, "")

    def ready(self) -> Served:
        assert "ready at" in line_of_ready(self.process.stdout), self.lines
        return self

    def end(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)
        self.process.wait(SECONDS)

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(SECONDS)
        self._errors.join(SECONDS)
        self.process.stdout.close()
        self.process.stderr.close()


class Load:
    """What a load of requests has seen: the first id of each answer, in order of their ends, and failures."""

    def __init__(self) -> None:
        self.answers: list[str | None] = []
        self.failures: list[str] = []

    def reaches(self, more: int) -> None:
        """Wait for so many answers more."""
        wanted = len(self.answers) + more
        wait_for(lambda: len(self.answers) >= wanted or self.failures, f"{more} answers more")


@contextmanager
def load_on(url: str, queries: list[str], clients: int = 4) -> Iterator[Load]:
    """Requests without a pause, by so many clients, each failure kept."""
    seen = Load()
    over = threading.Event()

    def ask(turn: int) -> None:
        with httpx.Client(base_url=url, trust_env=False, timeout=SECONDS) as client:
            while not over.is_set():
                turn += 1
                body = {"queries": [queries[turn % len(queries)]], "topk": 3, "return_scores": True}
                try:
                    answer = client.post("/retrieve", json=body)
                    answer.raise_for_status()
                    hits = answer.json()["result"][0]
                except httpx.HTTPStatusError as error:
                    seen.failures.append(f"{error.response.status_code} {error.response.text}")
                    continue
                except (httpx.HTTPError, ValueError, KeyError) as error:
                    seen.failures.append(f"{type(error).__name__}: {error}")
                    continue
                seen.answers.append(hits[0]["document"]["id"] if hits else None)

    threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        over.set()
        for thread in threads:
            thread.join(SECONDS)
