"""Running an application: in a thread of this process (a run, a Ray actor, a test), or alone until a signal ends it."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext

import uvicorn
from fastapi import FastAPI

from services.common import signals
from services.common.http.errors import OneLineError

Assembled = Callable[[ExitStack], tuple[FastAPI, socket.socket]]
"""Makes an application and its bound socket; what must be closed in the end goes onto the stack."""


class CannotServe(OneLineError):
    """The address cannot be bound, or the server did not come up."""

    exit_code = 3


class RunningServer:
    """A service in a thread of this process."""

    def __init__(self, url: str, server: uvicorn.Server, thread: threading.Thread, parts: ExitStack):
        self.url, self._server, self._thread, self._parts = url, server, thread, parts

    def stop(self, timeout: float = 10.0) -> None:
        """End the server, then close what it holds. Safe to call twice."""
        self._server.should_exit = True
        self._thread.join(timeout / 2)
        if self._thread.is_alive():  # open event streams
            self._server.force_exit = True
            self._thread.join(timeout / 2)
        self._parts.close()


def bind(host: str, port: int, what: str) -> socket.socket:
    """A bound socket for `what`. Raises CannotServe with one line."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(512)  # so that nobody is turned away before the server is up
    except OSError as e:
        sock.close()
        why = (
            "in use; choose another with --port, 0 for any free one"
            if e.errno == errno.EADDRINUSE
            else e.strerror or str(e)
        )
        raise CannotServe(f"{what}: port {port} of {host} is {why}") from e
    return sock


def run_in_thread(assembled: Assembled, host: str, what: str, timeout_seconds: float) -> RunningServer:
    """Assemble a service, run it in a thread, and return once it answers. Raises CannotServe, and what assembling raises."""
    parts = ExitStack()
    try:
        app, sock = assembled(parts)
        server = uvicorn.Server(_config(app))
        thread = threading.Thread(
            target=server.run, kwargs={"sockets": [sock]}, name=what.replace(" ", "-"), daemon=True
        )
        thread.start()
        deadline = time.monotonic() + timeout_seconds
        while not server.started:
            if not thread.is_alive() or time.monotonic() > deadline:
                server.should_exit = True
                raise CannotServe(f"{what} on {host}: not up within {timeout_seconds:g} s")
            time.sleep(0.02)
    except BaseException:
        parts.close()
        raise
    return RunningServer(url_of(host, sock), server, thread, parts)


def run_until_signal(assembled: Assembled, announce: Callable[[socket.socket], None]) -> int:
    """Assemble a service, announce its socket, and run it in the foreground until SIGINT or SIGTERM. Returns the exit status (130, 143)."""
    servers: list[uvicorn.Server] = []
    with ExitStack() as parts:
        received = parts.enter_context(
            signals.remembered(lambda number: signals.stop_servers(servers, number))
        )
        app, sock = assembled(parts)
        announce(sock)
        servers.append(uvicorn.Server(_config(app)))
        servers[0].capture_signals = nullcontext  # they come to `stop_servers`
        if not received:
            servers[0].run(sockets=[sock])
    return 128 + received[-1] if received else 0


def url_of(host: str, sock: socket.socket) -> str:
    """The address of a bound socket, as a client on this machine writes it."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{sock.getsockname()[1]}"


def _config(app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=3, lifespan="off"
    )
