"""Ports of this host for tests."""

from __future__ import annotations

import socket

_held: list[socket.socket] = []


def kept_port() -> int:
    """A port at which nobody listens, and which the system gives to nobody else while this process lives. A
    server that sets SO_REUSEADDR, as ours and Redis do, can come to listen there, also more than once."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    _held.append(held)
    return held.getsockname()[1]
