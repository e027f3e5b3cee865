"""Addresses of likelihood stores of both kinds."""

from __future__ import annotations

import pytest
from redis_server import redis_server  # noqa: F401  # for `url`

from services.likelihood.store.opening import open_store


@pytest.fixture(params=["sqlite", "redis"])
def url(request, tmp_path):
    """A store's address with nothing in it."""
    if request.param == "sqlite":
        return f"sqlite:{tmp_path / 'l.db'}"
    server = request.getfixturevalue("redis_server")
    store = open_store(server.url)
    for run in store.runs():
        store.delete_run(run.run)
    store.close()
    return server.url
