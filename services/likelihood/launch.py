"""Starting the likelihood service: in this process's thread (a Ray actor, a test), or alone until a signal ends it."""

from __future__ import annotations

import errno
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from types import FrameType

import uvicorn
from fastapi import FastAPI
from pydantic import Field

from services.http.auth import required_token
from services.likelihood.mirrors import Mirror, Mirroring, TensorBoardMirror, WandbMirror
from services.likelihood.records import LikelihoodError
from services.likelihood.server import create_app
from services.likelihood.store import open_store
from services.redaction import address_without_secrets
from services.settings import MonitorRules, Settings

WHAT = "likelihood service"
Assembled = Callable[[ExitStack], tuple[FastAPI, socket.socket]]
"""Makes an application and its bound socket; what must be closed in the end goes onto the stack."""


class ServeSettings(Settings):
    """Where the likelihood service listens and what it keeps."""

    store: str
    """`PATH`, `sqlite:PATH` or `redis://HOST:PORT/DB`."""
    host: str = "127.0.0.1"
    """Address to bind; beyond this machine UNSPIRAL_API_TOKEN must be set."""
    port: int = Field(8100, ge=0, le=65535)
    """0 takes any free port."""
    token_steps: int = Field(8, ge=1)
    """Steps whose token arrays are kept."""
    token: str | None = Field(None, repr=False)
    """Bearer token to ask for; UNSPIRAL_API_TOKEN if left out."""
    tensorboard: str | None = None
    """Folder to which every step is mirrored as TensorBoard event files."""
    wandb: str | None = None
    """Weights & Biases project to which every step is mirrored."""
    rules: MonitorRules = MonitorRules()
    """Thresholds of the service's phase monitor; a driver that starts the service passes its own."""
    start_timeout_seconds: float = Field(30.0, gt=0)
    """Longest wait for the server to answer."""


class CannotServe(LikelihoodError):
    """The address cannot be bound, or the server did not come up."""

    exit_code = 3


class RunningServer:
    """A service in a thread of this process."""

    def __init__(self, url: str, server: uvicorn.Server, thread: threading.Thread, parts: ExitStack):
        self.url, self._server, self._thread, self._parts = url, server, thread, parts

    def stop(self, timeout: float = 10.0) -> None:
        """End the server, then close its store and trackers. Safe to call twice."""
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
        why = "in use; choose another with --port, 0 for any free one" if e.errno == errno.EADDRINUSE else e.strerror or str(e)
        raise CannotServe(f"{what}: port {port} of {host} is {why}") from e
    return sock


def serve_in_thread(settings: ServeSettings) -> RunningServer:
    """Start the service and return once it answers. Raises CannotServe, StoreError, TokenRequired, MirrorError."""
    return run_in_thread(lambda parts: _assembled(settings, parts), settings.host, WHAT, settings.start_timeout_seconds)


def run_in_thread(assembled: Assembled, host: str, what: str, timeout_seconds: float) -> RunningServer:
    """Assemble a service, run it in a thread, and return once it answers. Raises CannotServe, and what assembling raises."""
    parts = ExitStack()
    try:
        app, sock = assembled(parts)
        server = uvicorn.Server(_config(app))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, name=what.replace(" ", "-"), daemon=True)
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


def serve_forever(settings: ServeSettings, announce: Callable[[str], None] = print) -> int:
    """Run the service in the foreground until SIGINT or SIGTERM, and return the exit status (130, 143)."""
    about = f"store {without_password(settings.store)}; page at /, API at /docs"
    return run_until_signal(
        lambda parts: _assembled(settings, parts), lambda sock: announce(f"{WHAT}: {url_of(settings.host, sock)} ({about})")
    )


def run_until_signal(assembled: Assembled, announce: Callable[[socket.socket], None]) -> int:
    """Assemble a service, announce its socket, and run it in the foreground until SIGINT or SIGTERM. Returns the exit status (130, 143)."""
    received: list[int] = []
    servers: list[uvicorn.Server] = []

    def remember(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for server in servers:  # one that is starting has no handlers of its own yet
            server.should_exit = True

    with ExitStack() as parts:
        # uvicorn handles both signals while it runs, and raises them again after the drain: then they land here, and all is closed.
        for number in (signal.SIGINT, signal.SIGTERM):
            parts.callback(signal.signal, number, signal.signal(number, remember))
        app, sock = assembled(parts)
        announce(sock)
        servers.append(uvicorn.Server(_config(app)))
        if not received:
            servers[0].run(sockets=[sock])
    return 128 + received[-1] if received else 0


def _assembled(settings: ServeSettings, parts: ExitStack) -> tuple[FastAPI, socket.socket]:
    """The application and its bound socket; what must be closed goes onto `parts`."""
    token = required_token(settings.host, settings.token)
    sock = parts.enter_context(closing(bind(settings.host, settings.port, WHAT)))
    store = open_store(settings.store, settings.token_steps)
    parts.callback(store.close)
    mirrors: list[Mirror] = []
    if settings.tensorboard:
        mirrors.append(TensorBoardMirror(settings.tensorboard))
    if settings.wandb:
        mirrors.append(WandbMirror(settings.wandb))
    mirroring = Mirroring(mirrors) if mirrors else None
    if mirroring:
        parts.callback(mirroring.close)
    return create_app(store, token, settings.rules, mirroring), sock


def url_of(host: str, sock: socket.socket) -> str:
    """The address of a bound socket, as a client on this machine writes it."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{sock.getsockname()[1]}"


def without_password(store: str) -> str:
    """The store's address as it may be shown."""
    return address_without_secrets(store, user="")


def _config(app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=3, lifespan="off")
