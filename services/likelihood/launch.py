"""Starting the likelihood service: in this process's thread (a Ray actor, a test), or alone until a signal ends it."""

from __future__ import annotations

import errno
import socket
import threading
import time

import uvicorn
from pydantic import Field

from services.likelihood.auth import required_token
from services.likelihood.records import LikelihoodError
from services.likelihood.server import create_app
from services.likelihood.store import open_store
from services.settings import MonitorRules, Settings


class LikelihoodServerSettings(Settings):
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
    rules: MonitorRules = MonitorRules()
    """Thresholds of the service's phase monitor; a driver that starts the service passes its own."""
    start_timeout_seconds: float = Field(30.0, gt=0)
    """Longest wait for the server to answer."""


class CannotServe(LikelihoodError):
    """The address cannot be bound, or the server did not come up."""

    exit_code = 3


class RunningServer:
    """A service in a thread of this process."""

    def __init__(self, url: str, server: uvicorn.Server, thread: threading.Thread, store):
        self.url, self._server, self._thread, self._store = url, server, thread, store

    def stop(self, timeout: float = 10.0) -> None:
        """End the server and close its store. Safe to call twice."""
        self._server.should_exit = True
        self._thread.join(timeout / 2)
        if self._thread.is_alive():  # open event streams
            self._server.force_exit = True
            self._thread.join(timeout / 2)
        self._store.close()


def bind(host: str, port: int) -> socket.socket:
    """A bound socket. Raises CannotServe with one line."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(512)  # so that nobody is turned away before the server is up
    except OSError as e:
        sock.close()
        why = "in use; choose another with --port, 0 for any free one" if e.errno == errno.EADDRINUSE else e.strerror or str(e)
        raise CannotServe(f"likelihood service: port {port} of {host} is {why}") from e
    return sock


def serve_in_thread(settings: LikelihoodServerSettings) -> RunningServer:
    """Start the service and return once it answers. Raises CannotServe, StoreError, TokenRequired."""
    token = required_token(settings.host, settings.token)
    sock = bind(settings.host, settings.port)
    try:
        store = open_store(settings.store, settings.token_steps)
    except Exception:
        sock.close()
        raise
    server = uvicorn.Server(_config(create_app(store, token, settings.rules)))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, name="likelihood-service", daemon=True)
    thread.start()
    deadline = time.monotonic() + settings.start_timeout_seconds
    while not server.started:
        if not thread.is_alive() or time.monotonic() > deadline:
            server.should_exit = True
            store.close()
            raise CannotServe(f"likelihood service on {settings.host}: not up within {settings.start_timeout_seconds:g} s")
        time.sleep(0.02)
    return RunningServer(url_of(settings.host, sock), server, thread, store)


def serve_forever(settings: LikelihoodServerSettings, announce=print) -> None:
    """Run the service in the foreground until SIGINT or SIGTERM."""
    token = required_token(settings.host, settings.token)
    sock = bind(settings.host, settings.port)
    store = open_store(settings.store, settings.token_steps)
    announce(f"likelihood service: {url_of(settings.host, sock)} (store {settings.store}; page at /, API at /docs)")
    try:
        uvicorn.Server(_config(create_app(store, token, settings.rules))).run(sockets=[sock])
    finally:
        store.close()


def url_of(host: str, sock: socket.socket) -> str:
    """The address of a bound socket, as a client on this machine writes it."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{sock.getsockname()[1]}"


def _config(app) -> uvicorn.Config:
    return uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=3, lifespan="off")
