"""Running the server: in this process until a signal, in several processes, or in a background thread (in a
Ray actor, in a test)."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace

from fastapi import FastAPI
from prometheus_client.multiprocess import mark_process_dead
from pydantic import SecretStr
from uvicorn.config import STARTUP_FAILURE

from retriever_service.http.server import create_app
from retriever_service.http.service import Service
from retriever_service.http.standby import Crew, Standby
from retriever_service.http.still_loading import Cut, Say, telling
from retriever_service.search.backends import check_settings
from retriever_service.search.search_index import SearchIndex
from retriever_service.settings import ServerSettings
from services.common.http.auth import refuse_wide_without_token
from services.common.http.connections import Limits
from services.common.http.serving import (
    Manner,
    RunningServer,
    bind,
    exit_status,
    run_in_thread,
    run_until_signal,
    url_of,
)
from services.common.http.workers import end_with_parent, run_workers
from services.common.processes import signals

_SETTINGS_VARIABLE = "UNSPIRAL_RETRIEVER_SETTINGS"
_CREW_VARIABLE = "UNSPIRAL_RETRIEVER_WORKERS"
_SECRETS = {"token": "UNSPIRAL_RETRIEVER_TOKEN", "shard_token": "UNSPIRAL_RETRIEVER_SHARD_TOKEN"}
"""Settings that no dump shows, each with the variable that hands it to workers."""
WHAT = "retriever"
REMEDY = "ask for a token with --token-env, or say --insecure inside a private network"


def _manner(settings: ServerSettings) -> Manner:
    return Manner(Limits(connections=settings.max_connections), settings.drain_seconds, lifespan="on")


def _check_host(settings: ServerSettings) -> None:
    if not settings.insecure:
        token = settings.token.get_secret_value() if settings.token is not None else None
        refuse_wide_without_token(settings.host, token, REMEDY)


def serve_in_thread(
    settings: ServerSettings,
    *,
    start_timeout_seconds: float = 120.0,
    open_index: Callable[[], SearchIndex] | None = None,
) -> RunningServer:
    """Start the server in a thread of this process and return once its index is loaded (`settings.workers` is
    not looked at).

    Raises IndexInvalid for an index that is missing or torn, EnvironmentLacks for a port in use or a
    server that is not ready in time, UserError for a wider host without token. `open_index` is for
    `create_app`.
    """
    _check_host(settings)
    app = create_app(settings, open_index)
    service = app.state.service

    def assembled(parts: ExitStack) -> tuple[FastAPI, socket.socket]:
        return app, parts.enter_context(closing(bind(settings.host, settings.port, WHAT)))

    def is_ready() -> bool:
        if service.failure:
            raise service.failure
        return service.index is not None

    return run_in_thread(assembled, settings.host, WHAT, start_timeout_seconds, _manner(settings), is_ready)


def run(
    settings: ServerSettings,
    on_start: Callable[[str, str], None] = lambda url, what: None,
    on_ready: Callable[[str], None] = lambda url: None,
    say: Say = lambda line: None,
) -> int:
    """Serve in this process, or under it, until SIGINT or SIGTERM, and return the exit status (130, 143).

    `on_start` is told the address and what is searched, when it listens; `on_ready` the address, when the
    index is loaded (by the first worker of several); `say` every 15 s what is still loading, and that a
    signal cut it off. Raises UserError, IndexInvalid and EnvironmentLacks
    before it listens, or later if the index turns out not to open.
    """
    _check_host(settings)
    what = check_settings(settings)

    def announce(sock: socket.socket) -> None:
        url = url_of(settings.host, sock)
        on_start(url, what)

    run_all = _run_workers if settings.workers > 1 else _run_one
    return run_all(settings, what, announce, Cut(on_ready), say)


def _run_one(
    settings: ServerSettings,
    what: str,
    announce: Callable[[socket.socket], None],
    cut: Cut,
    say: Say,
) -> int:
    services: list[Service] = []

    def assembled(parts: ExitStack) -> tuple[FastAPI, socket.socket]:
        # The port first: where it is in use, nothing was loaded in vain.
        sock = parts.enter_context(closing(bind(settings.host, settings.port, WHAT)))
        app = create_app(settings)
        app.state.on_failure = lambda error: app.state.end()
        app.state.on_ready = lambda: cut.ready(url_of(settings.host, sock))
        app.state.service.what = what
        services.append(app.state.service)
        return app, sock

    def loading() -> str:
        return services[0].loading if services and services[0].failure is None else ""

    with telling(loading, say):
        status = run_until_signal(assembled, announce, _manner(settings))
    (service,) = services
    if service.failure:
        raise service.failure
    cut.tell(status, say)
    if service.left_running:
        # A search, or the loading of an index, goes on past the drain: the interpreter would wait for it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _run_workers(
    settings: ServerSettings,
    what: str,
    announce: Callable[[socket.socket], None],
    cut: Cut,
    say: Say,
) -> int:
    with ExitStack() as parts:
        received = parts.enter_context(signals.remembered())
        sock = parts.enter_context(closing(bind(settings.host, settings.port, WHAT)))
        announce(sock)
        if received:
            cut.tell(exit_status(received), say)
            return exit_status(received)
        environment = {
            "PROMETHEUS_MULTIPROC_DIR": parts.enter_context(
                tempfile.TemporaryDirectory(prefix="retriever-metrics-")
            ),
            _CREW_VARIABLE: parts.enter_context(tempfile.TemporaryDirectory(prefix="retriever-workers-")),
            _SETTINGS_VARIABLE: settings.model_dump_json(exclude={*_SECRETS}),
        }
        for name, variable in _SECRETS.items():
            secret: SecretStr | None = getattr(settings, name)
            if secret is not None:
                environment[variable] = secret.get_secret_value()
        manner = _manner(settings)
        crew = Crew(environment[_CREW_VARIABLE])
        alone = replace(manner, lifespan="off")
        standby = parts.enter_context(Standby(settings, sock, crew, what, alone, cut.ready))

        def gone(pid: int) -> None:
            mark_process_dead(pid)
            standby.gone(pid)

        factory = "retriever_service.http.launch:worker_app"

        def loading() -> str:
            return "" if crew.any_ready() else "; ".join(filter(None, (what, crew.waits())))

        parts.enter_context(telling(loading, say))
        received += run_workers(factory, settings.workers, sock, WHAT, manner, environment, gone, standby.end)
        cut.tell(exit_status(received), say)
        return exit_status(received)


def _end_worker(error: Exception) -> None:
    print(f"retriever worker: the index can't be opened: {error}", file=sys.stderr, flush=True)
    os._exit(STARTUP_FAILURE)


def worker_app() -> FastAPI:
    """The application of one of several workers, its settings from the environment that `run` makes for
    it."""
    signals.left_to_parent()
    signals.hold(signal.SIGUSR1)
    settings = ServerSettings.model_validate_json(os.environ[_SETTINGS_VARIABLE])
    end_with_parent(_manner(settings).drain_seconds)
    for name, variable in _SECRETS.items():
        secret = os.environ.get(variable)
        setattr(settings, name, None if secret is None else SecretStr(secret))
    app = create_app(settings)
    app.state.on_failure = _end_worker
    crew = Crew(os.environ[_CREW_VARIABLE])
    app.state.service.on_wait = crew.tell
    # So that it accepts no request before it can answer, while another worker could.
    app.state.load_first = crew.take_over
    return app
