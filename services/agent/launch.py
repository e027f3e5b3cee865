"""Starting an agent's service: alone until a signal ends it, or in a thread (a test)."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress

import psutil
from fastapi import FastAPI

from services.agent.agent import Asked, Curves
from services.agent.server import Service, ServiceLimits, create_app
from services.common.http.auth import required_token
from services.common.http.connections import Limits
from services.common.http.serving import (
    Manner,
    RunningServer,
    bind,
    run_in_thread,
    run_until_signal,
    tell_of_signal,
    url_of,
)

WHAT = "agent"
START_SECONDS = 600.0


def _manner(connections: int) -> Manner:
    return Manner(Limits(connections=connections), drain_seconds=10.0, lifespan="on")


def serve_in_thread(
    agent: Asked, name: str, limits: ServiceLimits | None = None, curves: Curves | None = None
) -> RunningServer:
    """Serve on a free port of 127.0.0.1, and return once the model is loaded. Raises what its start
    raises."""
    made: list[Service] = []

    def assembled(parts: ExitStack) -> tuple[FastAPI, socket.socket]:
        app = create_app(agent, name, None, limits, curves)
        made.append(app.state.service)
        return app, parts.enter_context(closing(bind("127.0.0.1", 0, WHAT)))

    def is_ready() -> bool:
        if made[0].failure is not None:
            raise made[0].failure
        return made[0].ready

    return run_in_thread(assembled, "127.0.0.1", WHAT, START_SECONDS, _manner(1000), is_ready)


def serve_forever(
    agent: Asked,
    name: str,
    host: str,
    port: int,
    limits: ServiceLimits,
    connections: int,
    announce: Callable[[str], None],
    curves: Curves | None = None,
    give_back: Callable[[], None] = lambda: None,
) -> int:
    """Serve in the foreground until SIGINT or SIGTERM, and return the exit status (130, 143). Raises
    CannotServe, UserError for a wider host without a token, and what ended the agent.

    give_back: gives back what the caller holds for the agent. A signal that comes while the model loads,
    which a library does in calls that cannot be cancelled, calls it and ends this process at once."""
    token = required_token(host)
    made: list[Service] = []

    def assembled(parts: ExitStack) -> tuple[FastAPI, socket.socket]:
        sock = parts.enter_context(closing(bind(host, port, WHAT)))
        app = create_app(agent, name, token, limits, curves)
        made.append(app.state.service)
        made[0].on_failure = lambda: app.state.end()
        made[0].on_ready = lambda: announce(f"{WHAT}: the model is loaded")
        return app, sock

    def say(line: str) -> None:
        announce(f"{WHAT}: {line}")

    def cut_off(number: int) -> None:
        if not made or made[0].ready or made[0].failure is not None:
            return
        tell_of_signal(128 + number, say, "the model was loading")
        with suppress(Exception):
            give_back()
        for process in psutil.Process().children(recursive=True):  # the engine's
            with suppress(psutil.Error):
                process.kill()
        os._exit(128 + number)

    status = run_until_signal(
        assembled,
        lambda sock: announce(f"{WHAT}: {url_of(host, sock)}/v1 (model {name}; API at /docs); loading"),
        _manner(connections),
        cut_off,
        say,
    )
    if made and made[0].failure is not None:
        raise made[0].failure
    return status
