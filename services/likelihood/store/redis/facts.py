"""What a run says of itself and what people call it, in the Redis store: one hash per run, JSON by kind."""

from __future__ import annotations

from typing import Any, Literal

import orjson

from services.likelihood.records import check_run_name
from services.likelihood.store.base import NotStored
from services.likelihood.store.redis.part import RedisPart

Kind = Literal["about", "labels"]


def labels_of(body: bytes | None) -> dict[str, Any]:
    """What people call a run, from the field of the hash."""
    return orjson.loads(body) if body else {}


class RedisFacts(RedisPart):
    """That part of the store (see LikelihoodStore)."""

    def put_about(self, run: str, changes: dict[str, Any]) -> None:
        check_run_name(run)
        self._set_keys(run, "about", changes)

    def about(self, run: str) -> dict[str, Any]:
        with self._talking():
            self._known(run)
            body = self._redis.hget(self._keys(run)("facts"), "about")
        return orjson.loads(body) if body else {}

    def put_labels(self, run: str, changes: dict[str, Any]) -> None:
        self._set_keys(run, "labels", changes)

    def _set_keys(self, run: str, kind: Kind, changes: dict[str, Any]) -> None:
        at = self._keys(run)
        place = at("facts")

        def write(pipe: Any) -> None:
            if kind == "labels" and not pipe.exists(at("run")):
                raise NotStored(f"run {run[:140]!r}: not in this store")
            held = orjson.loads(pipe.hget(place, kind) or b"{}")
            pipe.multi()
            if kind == "about":
                self._touch(pipe, run)
            pipe.hset(place, kind, orjson.dumps(held | changes))

        self._transaction(write, place, at("run"))
