"""Starting the control plane: in a thread of the run's own process, or as a gateway that a signal ends."""

from __future__ import annotations

import errno
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType

import uvicorn

from services.control.records import Control
from services.control.server import create_app
from services.likelihood.auth import required_token
from services.likelihood.launch import CannotServe, RunningServer, bind, url_of
from services.settings import ControlSettings

WHAT = "control plane"
START_SECONDS = 30.0


def serve_in_thread(
    control: Control, settings: ControlSettings, say: Callable[[str], None], id: str | None = None
) -> RunningServer:
    """Serve a run's own control plane. Where the port is taken, by another run mostly, a free one serves, and `say` is told.

    id: what the health check gives back. Raises CannotServe for any other fault of the address, TokenRequired for one beyond this machine without UNSPIRAL_API_TOKEN.
    """
    token = required_token(settings.host)
    try:
        sock = bind(settings.host, settings.port, WHAT)
    except CannotServe as e:
        if not isinstance(e.__cause__, OSError) or e.__cause__.errno != errno.EADDRINUSE:
            raise
        sock = bind(settings.host, 0, WHAT)
        say(
            f"control plane: port {settings.port} of {settings.host} is in use, by another run perhaps; {url_of(settings.host, sock)} serves this one"
        )
    server = uvicorn.Server(_config(create_app(control, token, id)))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, name="control-plane", daemon=True)
    parts = ExitStack()
    parts.callback(sock.close)
    thread.start()
    deadline = time.monotonic() + START_SECONDS
    while not server.started:
        if not thread.is_alive() or time.monotonic() > deadline:
            server.should_exit = True
            parts.close()
            raise CannotServe(f"control plane on {settings.host}: not up within {START_SECONDS:g} s")
        time.sleep(0.02)
    return RunningServer(url_of(settings.host, sock), server, thread, parts)


def serve_forever(control: Control, host: str, port: int, announce: Callable[[str], None]) -> int:
    """Run a gateway in the foreground until SIGINT or SIGTERM, and return the exit status (130, 143)."""
    received: list[int] = []
    token = required_token(host)
    sock: socket.socket = bind(host, port, WHAT)
    server = uvicorn.Server(_config(create_app(control, token)))

    def remember(number: int, frame: FrameType | None) -> None:
        received.append(number)
        server.should_exit = True

    with ExitStack() as parts:
        parts.callback(sock.close)
        for number in (signal.SIGINT, signal.SIGTERM):
            parts.callback(signal.signal, number, signal.signal(number, remember))
        announce(f"control plane: {url_of(host, sock)} (API at /docs)")
        server.run(sockets=[sock])
    return 128 + received[-1] if received else 0


def _config(app) -> uvicorn.Config:
    return uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=3, lifespan="off")
