"""What happened in a run, in the Redis store: a stream of all events, and one of the evaluations, which every
curve needs and which stand far apart among the others."""

from __future__ import annotations

import time
from typing import Any

import orjson

from services.likelihood.records import EventRecord, check_run_name
from services.likelihood.store.base import EVALUATION
from services.likelihood.store.redis.part import RedisPart

EVENTS_KEPT = 10_000
ALL = "events"
EVALUATIONS = "evaluations"
SORTED = "events_sorted"
"""Set once the evaluations of the first stream are in the second one."""


class RedisEvents(RedisPart):
    """That part of the store (see LikelihoodStore)."""

    def put_event(self, run: str, event: EventRecord) -> None:
        check_run_name(run)
        at = self._keys(run)
        fields = {**event.model_dump(), "data": orjson.dumps(event.data), "time": time.time()}
        if event.kind == EVALUATION:
            self._sort(run)
        with self._talking(), self._redis.pipeline() as pipe:
            self._touch(pipe, run)
            for stream in (ALL, EVALUATIONS) if event.kind == EVALUATION else (ALL,):
                # Approximately: Redis then drops whole nodes of the stream, which costs it next to nothing.
                pipe.xadd(at(stream), fields, maxlen=EVENTS_KEPT, approximate=True)
            pipe.execute()

    def events(self, run: str, limit: int = 1000, kind: str | None = None) -> list[dict]:
        at = self._keys(run)
        with self._talking():
            self._known(run)
        if kind == EVALUATION:
            self._sort(run)
        with self._talking():
            if kind in (None, EVALUATION):
                stream = ALL if kind is None else EVALUATIONS
                entries = self._redis.xrevrange(at(stream), count=limit)
            else:
                found = self._redis.xrevrange(at(ALL))
                entries = [entry for entry in found if entry[1][b"kind"].decode() == kind][:limit]
        return [
            {
                "step": int(e[b"step"]),
                "kind": e[b"kind"].decode(),
                "text": e[b"text"].decode(),
                "data": orjson.loads(e[b"data"]),
                "time": float(e[b"time"]),
            }
            for _, e in reversed(entries)
        ]

    def _sort(self, run: str) -> None:
        """Copy the evaluations of a run that was stored before they had a stream of their own."""
        at = self._keys(run)

        def copy(pipe: Any) -> None:
            if pipe.exists(at(SORTED)):
                return
            entries = pipe.xrange(at(ALL))
            pipe.multi()
            pipe.set(at(SORTED), 1)
            for _, fields in entries:
                if fields[b"kind"].decode() == EVALUATION:
                    pipe.xadd(at(EVALUATIONS), fields)

        with self._talking():
            is_sorted = self._redis.exists(at(SORTED))
        if not is_sorted:
            self._transaction(copy, at(ALL), at(SORTED))
