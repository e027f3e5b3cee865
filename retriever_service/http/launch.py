"""Running the server: in this process until a signal, in several processes, or in a background thread (in a Ray actor, in a test)."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext

import uvicorn
from fastapi import FastAPI
from prometheus_client.multiprocess import mark_process_dead
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import Multiprocess
from uvicorn.supervisors.multiprocess import Process

from retriever_service.errors import EnvironmentLacks, RetrieverUnavailable
from retriever_service.http.server import create_app
from retriever_service.opening import check_settings
from retriever_service.settings import ServerSettings
from services.common import signals

_SETTINGS_VARIABLE = "UNSPIRAL_RETRIEVER_SETTINGS"
_TOKEN_VARIABLE = "UNSPIRAL_RETRIEVER_TOKEN"
_ANSWER_SECONDS = 60
"""A worker that reads a vocabulary of ten million terms answers nobody for that long, and is well."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises EnvironmentLacks with one line where the port is taken or the host is not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        sock.bind((host, port))
        sock.listen(2048)
    except OSError as error:
        sock.close()
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"can't be listened on ({error})"
        raise EnvironmentLacks(
            f"port {port} on {host} {reason}; give another with --port (0 is any free one)"
        ) from None
    sock.setblocking(False)
    return sock


def url_of(sock: socket.socket, host: str) -> str:
    """The address of a listening socket, as a client on this machine would write it."""
    port = sock.getsockname()[1]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(
        host, f"[{host}]" if ":" in host else host
    )
    return f"http://{shown}:{port}"


def _config(app, settings: ServerSettings, **options) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,  # a line for each search slows the server and says nothing that /metrics does not
        timeout_graceful_shutdown=max(1, round(settings.drain_seconds)),
        timeout_keep_alive=75,
        timeout_worker_healthcheck=_ANSWER_SECONDS,
        backlog=2048,
        **options,
    )


class RunningServer:
    """A server in a background thread. `url` is its address; a context manager that stops it."""

    def __init__(
        self, url: str, server: uvicorn.Server, thread: threading.Thread, sock: socket.socket
    ) -> None:
        self.url, self._server, self._thread, self._sock = url, server, thread, sock

    def stop(self, timeout_seconds: float = 30.0) -> None:
        """Answer what is in flight, then end the thread and free the port. May be called twice."""
        self._server.should_exit = True
        self._thread.join(timeout_seconds)
        self._sock.close()
        if self._thread.is_alive():
            raise RetrieverUnavailable(f"retriever at {self.url}: did not stop within {timeout_seconds:g} s")

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def serve_in_thread(
    settings: ServerSettings, *, start_timeout_seconds: float = 120.0, open_index: Callable | None = None
) -> RunningServer:
    """Start the server in a thread of this process and return once its index is loaded (`settings.workers` is not looked at).

    Raises IndexInvalid for an index that is missing or torn, EnvironmentLacks for a port in use, RetrieverUnavailable when it is not
    ready in time. `open_index` is for `create_app`.
    """
    app = create_app(settings, open_index)
    service = app.state.service
    sock = bind(settings.host, settings.port)
    server = uvicorn.Server(_config(app, settings))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, name="retriever", daemon=True)
    running = RunningServer(url_of(sock, settings.host), server, thread, sock)
    thread.start()
    until = time.monotonic() + start_timeout_seconds
    while service.index is None or not server.started:
        if service.failure or not thread.is_alive() or time.monotonic() > until:
            running.stop()
            raise service.failure or RetrieverUnavailable(
                f"retriever at {running.url}: not ready within {start_timeout_seconds:g} s"
            )
        time.sleep(0.01)
    return running


def run(settings: ServerSettings, on_start: Callable[[str, str], None] = lambda url, what: None) -> int:
    """Serve in this process, or under it, until SIGINT or SIGTERM, and return the exit status (130, 143).

    `on_start` is told the address and what is searched, when it listens. Raises IndexInvalid and EnvironmentLacks before it listens,
    or later if the index turns out not to open.
    """
    what = check_settings(settings)
    sock = bind(settings.host, settings.port)
    servers: list[uvicorn.Server] = []
    left_running = False
    try:
        with signals.remembered(lambda number: signals.stop_servers(servers, number)) as received:
            on_start(url_of(sock, settings.host), what)
            if settings.workers > 1 and not received:
                received += _run_workers(settings, sock)
            elif not received:
                app = create_app(settings)
                servers.append(uvicorn.Server(_config(app, settings)))
                servers[0].capture_signals = nullcontext  # they come to `stop_servers`
                if not received:
                    _run_one(app, servers[0], sock)
                left_running = app.state.service.left_running
    finally:
        sock.close()
    if (
        left_running
    ):  # a search or the loading of an index goes on past the drain: the interpreter would wait for its end
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(128 + received[-1] if received else 0)
    return 128 + received[-1] if received else 0


def _run_one(app: FastAPI, server: uvicorn.Server, sock: socket.socket) -> None:
    def give_up(error: Exception) -> None:
        server.should_exit = True

    app.state.on_failure = give_up
    server.run(sockets=[sock])
    if failure := app.state.service.failure:
        raise failure


class _Workers(Multiprocess):
    """uvicorn's supervisor, remembering the signal that ended it, and taking the gauges of workers that are gone out of /metrics.

    A stop waits neither for a worker's sign of life nor without end for its drain.
    """

    def __init__(self, config: uvicorn.Config, sockets: list[socket.socket]) -> None:
        super().__init__(config, sockets=sockets)
        self.ended_by: list[int] = []
        self._counted: set[int | None] = set()

    def keep_subprocess_alive(self) -> None:
        for process in self.processes:
            if process.process.is_alive() and not self._answers(process):
                process.kill()  # and another one starts below
        if self._stopping():
            return
        super().keep_subprocess_alive()
        running = {process.pid for process in self.processes}
        for pid in self._counted - running:
            mark_process_dead(pid)
        self._counted = running

    def _answers(self, process: Process) -> bool:
        """As uvicorn's `ping`, which would look at a signal to stop, or at a worker that died meanwhile, only when the time is up."""
        until = time.monotonic() + _ANSWER_SECONDS
        try:
            process.parent_conn.send(b"ping")
            while not process.parent_conn.poll(0.2):
                if self._stopping() or not process.process.is_alive():
                    return True
                if time.monotonic() > until:
                    return False
            process.parent_conn.recv()
        except (OSError, EOFError):
            return False
        return True

    def _stopping(self) -> bool:
        return self.should_exit.is_set() or bool({signal.SIGINT, signal.SIGTERM} & {*self.signal_queue})

    def join_all(self) -> None:
        until = time.monotonic() + 2 * self.config.timeout_graceful_shutdown + 5
        for process in self.processes:
            process.process.join(max(0.0, until - time.monotonic()))
            if process.process.is_alive():
                process.process.kill()
        super().join_all()

    def handle_int(self) -> None:
        self._stop(signal.SIGINT)
        super().handle_int()

    def handle_term(self) -> None:
        self._stop(signal.SIGTERM)
        super().handle_term()

    def _stop(self, number: int) -> None:
        self.ended_by.append(number)
        for sock in (
            self.sockets
        ):  # the workers close theirs: open here, it would take connections that nobody answers
            sock.close()


def _run_workers(settings: ServerSettings, sock: socket.socket) -> list[int]:
    with tempfile.TemporaryDirectory(prefix="retriever-metrics-") as metrics:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = metrics
        os.environ[_SETTINGS_VARIABLE] = settings.model_dump_json(exclude={"token"})
        if settings.token is not None:
            os.environ[_TOKEN_VARIABLE] = settings.token.get_secret_value()
        workers = _Workers(
            _config(
                "retriever_service.http.launch:worker_app", settings, factory=True, workers=settings.workers
            ),
            [sock],
        )
        try:
            workers.run()
        finally:
            for name in ("PROMETHEUS_MULTIPROC_DIR", _SETTINGS_VARIABLE, _TOKEN_VARIABLE):
                os.environ.pop(name, None)
    if not workers.ended_by:
        raise EnvironmentLacks("retriever: a worker could not start; its reason is in the lines above")
    return workers.ended_by


def _end_worker(error: Exception) -> None:
    print(f"retriever worker: the index can't be opened: {error}", file=sys.stderr, flush=True)
    os._exit(STARTUP_FAILURE)


def worker_app():
    """The application of one of several workers, its settings from the environment that `run` makes for it."""
    signals.left_to_parent()
    settings = ServerSettings.model_validate_json(os.environ[_SETTINGS_VARIABLE])
    settings.token = os.environ.get(_TOKEN_VARIABLE)
    app = create_app(settings)
    app.state.on_failure = _end_worker
    app.state.load_first = (
        True  # so that it accepts no request before it can answer, while another worker could
    )
    return app
