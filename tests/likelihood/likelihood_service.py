"""A likelihood service for tests: in a thread, or called without a socket."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from services.likelihood.rest.launch import ServeSettings, serve_in_thread
from services.likelihood.rest.server import create_app
from services.likelihood.store.sqlite.store import SQLiteStore


@pytest.fixture
def store(tmp_path) -> Iterator[SQLiteStore]:
    store = SQLiteStore(tmp_path / "l.db", token_steps=3)
    yield store
    store.close()


@pytest.fixture
def client(store) -> TestClient:
    return TestClient(create_app(store))


@contextmanager
def serving(folder: Path) -> Iterator:
    """The service over a new store in `folder`; `.url` is its address."""
    server = serve_in_thread(ServeSettings(store=str(folder / "likelihood.db"), port=0))
    try:
        yield server
    finally:
        server.stop()
