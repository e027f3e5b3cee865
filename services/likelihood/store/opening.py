"""From a store's address to the store."""

from __future__ import annotations

from services.likelihood.records import LikelihoodError
from services.likelihood.store.base import LikelihoodStore
from services.likelihood.store.sqlite_store import SQLiteStore


def open_store(url: str, token_steps: int = 8) -> LikelihoodStore:
    """`PATH`, `sqlite:PATH`, or `redis://HOST:PORT/DB`. Raises StoreError or LikelihoodError in one line."""
    if url.startswith(("redis:", "rediss:", "unix:")):
        from services.likelihood.store.redis_store import RedisStore  # its client is an extra

        return RedisStore(url, token_steps)
    path = url.removeprefix("sqlite:")
    if "://" in url or not path or path == ":memory:":  # each thread would have a database of its own
        raise LikelihoodError(f"store {url!r}: expected a file path, sqlite:PATH or redis://HOST:PORT/DB")
    return SQLiteStore(path, token_steps)
