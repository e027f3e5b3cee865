"""A small HTTP/1.1 load generator: N keep-alive connections, each sends its next request when it has the
answer to the last, or, with a rate, at times that are drawn before.

Run in a process of its own (`python -m benchmarks.retriever_load.http_load`), so that it shares no
interpreter lock with the server. It does as little as it can for an answer (finds the length, compares the
status), because on a small machine its work is taken from the server's.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

import uvloop


def post(path: str, body: dict) -> bytes:
    """A POST request with a JSON body."""
    payload = json.dumps(body).encode()
    return (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(payload)}\r\n\r\n"
    ).encode() + payload


def get(path: str) -> bytes:
    """A GET request."""
    return f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()


class _Connection(asyncio.Protocol):
    def __init__(self, load: _Load) -> None:
        self.load, self.buffer, self.needed, self.answers, self.over = load, b"", 0, 0, False
        self.due = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.send()

    def send(self) -> None:
        load = self.load
        now = time.perf_counter()
        if not load.running and self.answers:
            load.answered(self)
            return
        if not load.rate or not load.running:
            self.write(now)
            return
        # Latency counts from the time that was drawn: a client whose last answer was late asks late.
        self.due = (self.due or now) + load.draw.expovariate(load.rate / load.clients)
        pause = 0.0 if self.due >= load.until else max(0.0, self.due - now)
        asyncio.get_running_loop().call_later(pause, self.write, self.due)

    def write(self, due: float) -> None:
        load = self.load
        if due >= load.until:
            load.finished(self)
            return
        self.sent = due
        self.transport.write(load.requests[next(load.number) % len(load.requests)])

    def data_received(self, data: bytes) -> None:
        self.buffer = self.buffer + data if self.buffer else data
        if not self.needed:
            head = self.buffer.find(b"\r\n\r\n")
            if head < 0:
                return
            at = self.buffer.index(b"ontent-length: ") + 15
            self.needed = head + 4 + int(self.buffer[at : self.buffer.index(b"\r", at)])
        if len(self.buffer) >= self.needed:
            if self.buffer[9:12] == b"200":
                self.load.latencies.append(time.perf_counter() - self.sent)
            else:
                self.load.failures += 1
            self.buffer, self.needed = b"", 0
            self.answers += 1
            self.send()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.over:
            self.load.lost(error)


class _Load:
    def __init__(
        self, requests: list[bytes], clients: int, seconds: float, warm_up: float, rate: float = 0.0
    ) -> None:
        self.requests, self.clients, self.number = requests, clients, count()
        self.rate, self.draw = rate, random.Random(0)
        self.latencies: list[float] = []
        self.failures, self.open = 0, clients
        self.seconds, self.warm_up = seconds, warm_up
        self.until = float("inf")
        self.done = asyncio.Event()
        self.running, self.greeted = False, []
        self.error: str | None = None

    def answered(self, connection: _Connection) -> None:
        """The first answer of a connection: the load starts when each has had one, so that setting up is not
        measured."""
        self.greeted.append(connection)
        if len(self.greeted) == self.clients:
            self.running = True
            for connection in self.greeted:
                connection.send()

    def finished(self, connection: _Connection) -> None:
        connection.over = True
        connection.transport.close()
        self.open -= 1
        if not self.open:
            self.done.set()

    def lost(self, error: Exception | None) -> None:
        """The server closed a connection, which a client of a keep-alive server may not have to expect:
        nothing measured is worth anything."""
        self.error = f"the server closed a connection: {error or 'idle for too long, perhaps'}"
        self.running = True
        self.done.set()

    async def run(self, host: str, port: int) -> dict[str, float]:
        loop = asyncio.get_running_loop()
        for _ in range(self.clients):
            await loop.create_connection(lambda: _Connection(self), host, port)
        async with asyncio.timeout(300):
            while not self.running:
                await asyncio.sleep(0.01)
        await asyncio.sleep(self.warm_up)
        self.latencies.clear()
        started = time.perf_counter()
        self.until = started + self.seconds
        await asyncio.wait_for(self.done.wait(), self.seconds + 120)
        if self.error:
            raise SystemExit(self.error)
        took = time.perf_counter() - started
        ordered = sorted(self.latencies)

        def at(share):
            return (
                1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")
            )

        return {
            "rate": len(ordered) / took,
            "p50_ms": at(0.5),
            "p99_ms": at(0.99),
            "max_ms": at(1),
            "n": len(ordered),
            "failures": self.failures,
        }


def load(
    url: str, requests: list[bytes], clients: int, seconds: float, warm_up: float = 0.5, rate: float = 0.0
) -> dict[str, float]:
    """Requests/s, latency percentiles and failures of `clients` connections, measured from another process.

    Each sends its next request when it has the last answer. With `rate` they send so many per second
    together, each at random times (Poisson, seeded), however long answers take.
    """
    host, port = url.removeprefix("http://").split(":")
    job = {
        "host": host,
        "port": int(port),
        "requests": [r.hex() for r in requests],
        "clients": clients,
        "seconds": seconds,
        "warm_up": warm_up,
        "rate": rate,
    }
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.retriever_load.http_load"],
        input=json.dumps(job),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    return json.loads(done.stdout)


def _main() -> None:
    job = json.load(sys.stdin)
    work = _Load(
        [bytes.fromhex(r) for r in job["requests"]],
        job["clients"],
        job["seconds"],
        job["warm_up"],
        job["rate"],
    )
    print(json.dumps(uvloop.run(work.run(job["host"], job["port"]))))


if __name__ == "__main__":
    _main()
