"""From a store's address to the store."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from services.common.errors import UserError
from services.common.loading.extras import needed_for
from services.common.redaction import address_without_secrets
from services.likelihood.store.base import SAMPLE_STEPS, LikelihoodStore
from services.likelihood.store.of_folder import FolderStore, stores_in
from services.likelihood.store.sqlite.store import SQLiteStore

REDIS_STORE = "services.likelihood.store.redis.store"
"""Imported on demand: the client of Redis is an extra, and a plain install opens SQLite without it."""


def is_redis(url: str) -> bool:
    """Whether a store's address is one of Redis."""
    return url.startswith(("redis:", "rediss:", "unix:"))


def open_store(url: str, token_steps: int = 8, sample_steps: int = SAMPLE_STEPS) -> LikelihoodStore:
    """`PATH`, `sqlite:PATH`, or `redis://HOST:PORT/DB`; a folder of runs is a store too. Raises
    EnvironmentLacks or UserError in one line."""
    if is_redis(url):
        with needed_for(f"store {address_without_secrets(url)}", "redis"):
            found = import_module(REDIS_STORE)
        store: LikelihoodStore = found.RedisStore(url, token_steps, sample_steps)
        return store
    path = url.removeprefix("sqlite:")
    if "://" in url or not path or path == ":memory:":  # each thread would have a database of its own
        raise UserError(f"store {url!r}: expected a file path, sqlite:PATH or redis://HOST:PORT/DB")
    if stores_in(Path(path)):
        return FolderStore(Path(path), token_steps, sample_steps)
    return SQLiteStore(path, token_steps, sample_steps)
