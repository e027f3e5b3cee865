"""The store at which the processes of a group meet: PyTorch's TCPStore. It asks nobody for a token and would
listen on all interfaces, so it is given a socket of one address."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

BACKLOG = 2048


def listening_store(host: str, timeout_seconds: float) -> Any:
    """A TCPStore that this process serves on a free port of the address `host` alone. Raises OSError where
    this host lacks the address."""
    from torch.distributed import TCPStore

    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        sock.bind((host, 0))
        sock.listen(BACKLOG)
        store = TCPStore(
            host,
            sock.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_seconds),
            master_listen_fd=sock.fileno(),
        )
        sock.detach()  # the store closes it
    return store
