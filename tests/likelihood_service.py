"""A likelihood service in a thread, for tests of what posts to one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.likelihood.launch import ServeSettings, serve_in_thread


@contextmanager
def serving(folder: Path) -> Iterator:
    """The service over a new store in `folder`; `.url` is its address."""
    server = serve_in_thread(ServeSettings(store=str(folder / "likelihood.db"), port=0))
    try:
        yield server
    finally:
        server.stop()
