"""The four services, each served for real in a thread, for the tests of what they share."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from fastapi import FastAPI

from retriever_service.http.server import create_app as create_retriever
from retriever_service.settings import ServerSettings
from services.agent.server import create_app as create_agent
from services.common.errors import UserError
from services.common.http.connections import Limits
from services.common.http.serving import Manner, bind, run_in_thread
from services.control.records import Done, RunStatus
from services.control.server import create_app as create_control
from services.likelihood.rest.server import create_app as create_likelihood
from services.likelihood.store.sqlite.store import SQLiteStore
from tests.agent.agent_world import CHAT, NAME, StillAgent

NAMES = ("retriever", "likelihood", "control", "agent")
STEP = json.dumps({"step": 0, "metrics": {"x": 1.0}}).encode()
POSTS = {
    "retriever": ("/retrieve", b'{"query": "Mina Frost"}'),
    "likelihood": ("/v1/runs/run/steps", STEP),
    "control": ("/v1/pause", b""),
    "agent": ("/v1/chat/completions", CHAT),
}
"""A request that changes or reads something, by service."""


class StillRun:
    """A control plane's run in which nothing happens."""

    async def ready(self) -> None:
        pass

    async def status(self) -> RunStatus:
        return RunStatus(state="running", run="r", step=4, steps=9)

    async def scale(self, n: int | str, ahead: bool) -> Done:
        return Done(text=f"{n} workers wanted")

    async def drain(self, worker: str) -> Done:
        raise UserError(f"no worker {worker}; there are none", status=404)

    async def pause(self) -> Done:
        return Done(text="pauses")

    async def resume(self) -> Done:
        return Done(text="goes on")


@dataclass
class Served:
    """A service that runs."""

    name: str
    url: str

    @property
    def port(self) -> int:
        return httpx.URL(self.url).port

    def client(self, **options) -> httpx.Client:
        return httpx.Client(base_url=self.url, trust_env=False, timeout=30, **options)

    def post(self, client: httpx.Client, **headers: str) -> httpx.Response:
        path, body = POSTS[self.name]
        return client.post(path, content=body, headers={"content-type": "application/json", **headers})

    def raw(self, *parts: bytes, seconds: float = 60) -> bytes:
        """What comes back until the server ends the connection, or says nothing for `seconds`."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=seconds) as s:
            for part in parts:
                s.sendall(part)
            return read_all(s)

    def head_of_answer(self, request: bytes) -> bytes:
        """Status and headers, of a connection that the server leaves open."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as s, s.makefile("rb") as answer:
            s.sendall(request)
            return b"".join(iter(answer.readline, b"\r\n"))


def read_all(s: socket.socket) -> bytes:
    """What comes until the other side ends."""
    got = b""
    while True:
        try:
            part = s.recv(65536)
        except ConnectionError:
            return got
        if not part:
            return got
        got += part


def application(name: str, folder: Path, index: Path, token: str | None, parts: ExitStack) -> FastAPI:
    if name == "control":
        return create_control(StillRun(), token)
    if name == "agent":
        return create_agent(StillAgent(), NAME, token)
    if name == "likelihood":
        return create_likelihood(parts.enter_context(closing(SQLiteStore(folder / "l.db"))), token)
    return create_retriever(ServerSettings(index=str(index), token=token))


@contextmanager
def serving(
    name: str, folder: Path, index: Path, token: str | None = None, limits: Limits | None = None
) -> Iterator[Served]:
    """One of NAMES on a free port of 127.0.0.1."""
    made: list[FastAPI] = []

    def assembled(parts: ExitStack) -> tuple[FastAPI, socket.socket]:
        sock = parts.enter_context(closing(bind("127.0.0.1", 0, name)))
        made.append(application(name, folder, index, token, parts))
        return made[0], sock

    def is_ready() -> bool:
        if name == "agent":
            return made[0].state.service.ready
        return name != "retriever" or made[0].state.service.index is not None

    manner = Manner(limits or Limits(), lifespan="off" if name == "control" else "on")
    with run_in_thread(assembled, "127.0.0.1", name, 60, manner, is_ready) as running:
        yield Served(name, running.url)
