"""Running an application: in a thread of this process (a run, a Ray actor, a test), or alone until a signal
ends it."""

from __future__ import annotations

import errno
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import uvicorn
from fastapi import FastAPI

from services.common.errors import EnvironmentLacks
from services.common.http.connections import Config, Limits
from services.common.processes import signals
from services.common.processes.patience import Patience

BACKLOG = 2048
Assembled = Callable[[ExitStack], tuple[FastAPI, socket.socket]]
"""Makes an application and its bound socket; what must be closed in the end goes onto the stack."""


@dataclass(frozen=True)
class Manner:
    """How an application is served."""

    limits: Limits = field(default_factory=Limits)
    drain_seconds: float = 3.0
    """Seconds that requests in flight may go on at a stop."""
    lifespan: Literal["on", "off"] = "off"
    """Whether uvicorn runs the application's lifespan."""

    def config(self, app: Any, **options: Any) -> Config:
        """uvicorn's configuration of a server that is served so."""
        return Config(
            app,
            self.limits,
            log_level="warning",
            access_log=False,  # a line per request slows the server and says nothing that /metrics does not
            timeout_graceful_shutdown=max(1, round(self.drain_seconds)),
            backlog=BACKLOG,
            lifespan=self.lifespan,
            server_header=False,
            **options,
        )


class _Server(uvicorn.Server):
    """A server that installs no signal handlers: signals come to `signals.stop_servers`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing."""
        yield


class RunningServer:
    """A service in a thread of this process. `url` is its address; a context manager that stops it."""

    def __init__(
        self,
        url: str,
        what: str,
        server: uvicorn.Server,
        thread: threading.Thread,
        parts: ExitStack,
        drain_seconds: float,
    ):
        self.url = url
        self._what = what
        self._server = server
        self._thread = thread
        self._parts = parts
        self._drain = drain_seconds

    def stop(self, timeout: float | None = None) -> None:
        """Answer what is in flight, end the server, then close what it holds. Safe to call twice.

        timeout: seconds; by default twice the time to drain, and 10 more. Raises EnvironmentLacks where the
        server goes on past it.
        """
        timeout = 2 * self._drain + 10 if timeout is None else timeout
        self._server.should_exit = True
        self._thread.join(timeout / 2)
        if self._thread.is_alive():  # open event streams
            self._server.force_exit = True
            self._thread.join(timeout / 2)
        self._parts.close()
        if self._thread.is_alive():
            raise EnvironmentLacks(f"{self._what} at {self.url}: did not stop within {timeout:g} s")

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def bind(host: str, port: int, what: str) -> socket.socket:
    """A listening socket for `what`. Raises EnvironmentLacks with one line."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        sock.bind((host, port))
        sock.listen(BACKLOG)  # so that nobody is turned away before the server is up
    except OSError as e:
        sock.close()
        why = f"not one to listen on ({e.strerror or e})"
        if e.errno == errno.EADDRINUSE:
            why = "in use; choose another with --port, 0 for any free one"
        raise EnvironmentLacks(f"{what}: port {port} of {host} is {why}") from e
    sock.setblocking(False)
    return sock


def url_of(host: str, sock: socket.socket) -> str:
    """The address of a bound socket, as a client on this machine writes it."""
    wide = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}
    shown = wide.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{sock.getsockname()[1]}"


def run_in_thread(
    assembled: Assembled,
    host: str,
    what: str,
    timeout_seconds: float,
    manner: Manner | None = None,
    is_ready: Callable[[], bool] = lambda: True,
) -> RunningServer:
    """Assemble a service, run it in a thread, and return once it answers and `is_ready` says so.

    timeout_seconds: time without progress counts by the clock, other time by what this process used of it.
    Raises EnvironmentLacks, and what assembling and `is_ready` raise.
    """
    manner = manner or Manner()
    parts = ExitStack()
    with ExitStack() as undo:
        undo.callback(parts.close)
        app, sock = assembled(parts)
        server = uvicorn.Server(manner.config(app))
        name = what.replace(" ", "-")
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, name=name, daemon=True)
        running = RunningServer(url_of(host, sock), what, server, thread, parts, manner.drain_seconds)
        undo.pop_all()
        undo.callback(running.stop)  # which closes the parts too
        thread.start()
        patience = Patience(timeout_seconds, time.process_time)
        while not (server.started and is_ready()):
            if not thread.is_alive() or patience.over():
                raise EnvironmentLacks(
                    f"{what} at {running.url}: not up within {timeout_seconds:g} s{patience}"
                )
            time.sleep(0.02)
        undo.pop_all()
    return running


def exit_status(received: list[int]) -> int:
    """The exit status of a process that these signals ended: 130, 143, or 0 without a signal."""
    return 128 + received[-1] if received else 0


def tell_of_signal(status: int, say: Callable[[str], None], meanwhile: str = "") -> None:
    """Say which signal has ended a service, where the exit status is one's. meanwhile: what it cut off."""
    if status <= 128:
        return
    # Whoever read the lines may be gone, for which Rich's console ends the process with 1.
    with suppress(OSError, SystemExit):
        say(f"stopped by {signal.Signals(status - 128).name}" + (f" while {meanwhile}" if meanwhile else ""))


def run_until_signal(
    assembled: Assembled,
    announce: Callable[[socket.socket], None],
    manner: Manner | None = None,
    on_signal: Callable[[int], None] = lambda number: None,
    say: Callable[[str], None] = lambda line: None,
) -> int:
    """Assemble a service, announce its socket, and run it in the foreground until SIGINT or SIGTERM.

    `app.state.end` is set to a function that ends it from within. on_signal: called with each signal before
    the server hears of it. say: told which signal has ended it. Returns the exit status
    (130, 143, otherwise 0).
    """
    servers: list[uvicorn.Server] = []

    def end() -> None:
        for server in servers:
            server.should_exit = True

    def stop(number: int) -> None:
        on_signal(number)
        signals.stop_servers(servers, number)

    with ExitStack() as parts:
        received = parts.enter_context(signals.remembered(stop))
        app, sock = assembled(parts)
        app.state.end = end
        announce(sock)
        servers.append(_Server((manner or Manner()).config(app)))
        if not received:
            servers[0].run(sockets=[sock])
    status = exit_status(received)
    tell_of_signal(status, say)
    return status
