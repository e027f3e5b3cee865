"""Starting the control plane: in a thread of the run's own process, or as a gateway that a signal ends."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from contextlib import ExitStack, closing

from fastapi import FastAPI

from services.common.errors import EnvironmentLacks
from services.common.http.auth import required_token
from services.common.http.serving import (
    RunningServer,
    bind,
    run_in_thread,
    run_until_signal,
    url_of,
)
from services.control.records import Control
from services.control.server import create_app
from services.settings import ControlSettings

WHAT = "control plane"
START_SECONDS = 30.0


def serve_in_thread(
    control: Control, settings: ControlSettings, say: Callable[[str], None], id: str | None = None
) -> RunningServer:
    """Serve a run's own control plane. Where the port is taken, by another run mostly, a free one serves, and
    `say` is told.

    id: what the health check gives back. Raises EnvironmentLacks for any other fault of the address,
    UserError for one beyond this machine without UNSPIRAL_API_TOKEN.
    """
    token = required_token(settings.host)

    def assembled(parts: ExitStack) -> tuple[FastAPI, socket.socket]:
        return create_app(control, token, id), parts.enter_context(closing(_bind_or_free(settings, say)))

    return run_in_thread(assembled, settings.host, WHAT, START_SECONDS)


def _bind_or_free(settings: ControlSettings, say: Callable[[str], None]) -> socket.socket:
    try:
        return bind(settings.host, settings.port, WHAT)
    except EnvironmentLacks as e:
        if not isinstance(e.__cause__, OSError) or e.__cause__.errno != errno.EADDRINUSE:
            raise
    sock = bind(settings.host, 0, WHAT)
    url = url_of(settings.host, sock)
    say(
        f"{WHAT}: port {settings.port} of {settings.host} is in use, by another run perhaps; {url} serves "
        "this one"
    )
    return sock


def serve_forever(control: Control, host: str, port: int, announce: Callable[[str], None]) -> int:
    """Run a gateway in the foreground until SIGINT or SIGTERM, and return the exit status (130, 143)."""
    token = required_token(host)

    def assembled(parts: ExitStack) -> tuple[FastAPI, socket.socket]:
        return create_app(control, token), parts.enter_context(closing(bind(host, port, WHAT)))

    return run_until_signal(
        assembled,
        lambda sock: announce(f"{WHAT}: {url_of(host, sock)} (API at /docs)"),
        say=lambda line: announce(f"{WHAT}: {line}"),
    )
