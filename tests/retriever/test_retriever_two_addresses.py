"""Two servers behind one name, as Compose and Kubernetes have them: a new index, each exchanged in turn."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from retriever_service.client import RetrieverClient
from tests.ports import kept_port
from tests.retriever.retriever_loads import SECONDS, Load, Served, load_on, wait_for
from tests.retriever.test_retriever_reload import QUERY, build

NAME = "retriever"
ADDRESSES = ("127.0.0.1", "127.0.0.2")


@pytest.fixture
def name(monkeypatch):
    """The name has both addresses here, the first one first each time, so that a dead one is always met."""
    resolve = socket.getaddrinfo

    def both(host, port, *rest, **options):
        if host in (NAME, NAME.encode()):
            return [found for address in ADDRESSES for found in resolve(address, port, *rest, **options)]
        return resolve(host, port, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", both)
    monkeypatch.setenv("UNSPIRAL_ALLOWED_HOSTS", NAME)
    return NAME


class Trainers:
    """Searches without a pause by a RetrieverClient, as rollouts make them, in a thread of its own."""

    def __init__(self, url: str) -> None:
        self.seen = Load()
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._all(url)), daemon=True)

    async def _all(self, url: str) -> None:
        async with RetrieverClient(url, timeout_seconds=SECONDS) as client:
            await asyncio.gather(*(self._one(client) for _ in range(4)))

    async def _one(self, client: RetrieverClient) -> None:
        while not self._over.is_set():
            try:
                found = await client.retrieve([QUERY], topk=1)
            except Exception as error:  # whatever it is, the trajectory would have lost its search
                self.seen.failures.append(f"{type(error).__name__}: {error}")
            else:
                self.seen.answers.append(found[0][0].id)

    def __enter__(self) -> Load:
        self._thread.start()
        return self.seen

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self._thread.join(SECONDS)


def opened_anew(server: Served) -> bool:
    return any("is opened anew" in line for line in server.lines)


@pytest.mark.slow
def test_a_rolling_reload_and_an_exchange_in_turn_cost_no_search(tmp_path, name):
    port = kept_port()
    place = build(tmp_path, "old", "old ")
    words = ("--index", place, "--reload-seconds", 0.2, "--cache-size", 0)
    servers = [Served(*words, "--host", address, port=port) for address in ADDRESSES]
    try:
        for server in servers:
            server.ready()
        url = f"http://{name}:{port}"
        with load_on(url, [QUERY]) as plain, Trainers(url) as ours:
            for load in (plain, ours):
                load.reaches(20)
                assert set(load.answers) == {"old d59"}
            build(tmp_path, "new", "new ", overwrite=True)
            wait_for(lambda: all(opened_anew(server) for server in servers), "line about the new index")
            switched = len(plain.answers) + 4, len(ours.answers) + 4  # an answer of each may be on its way
            for load, since in zip((plain, ours), switched, strict=True):
                load.reaches(20)
                assert set(load.answers[since:]) == {"new d59"} and load.failures == []
        with Trainers(url) as ours:
            for number, address in enumerate(ADDRESSES):
                ours.reaches(20)
                servers[number].end()
                ours.reaches(20)
                servers[number] = Served(*words, "--host", address, port=port).ready()
            ours.reaches(20)
        assert ours.failures == [] and set(ours.answers) == {"new d59"}
    finally:
        for server in servers:
            with server:
                pass
