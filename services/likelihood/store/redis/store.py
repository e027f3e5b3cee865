"""The shared likelihood store: Redis, without modules. Sorted sets and hashes for steps, dense strings for
curves, a stream for events.

Keys, all below `unspiral:`
    runs                          sorted set: run, by time of the latest post
    RUN:run                       hash: created, updated
    RUN:attempts                  hash: attempt -> its first step
    RUN:steps                     hash: step -> JSON of what was posted and worked out
    RUN:groups                    hash: step -> JSON of the numbers of its trajectories and groups
    RUN:order                     sorted set of the steps
    RUN:trajectories:{step}       hash: uid -> JSON; expires after `trajectory_seconds`
    RUN:names                     set of metric names
    RUN:curve:{name}:{chunk}      string of CHUNK float64, XORed with NaN: what was never written reads as NaN
    RUN:tokens                    hash: step -> attempt
    RUN:tokens:{step}             npz body; expires after `token_seconds`
    RUN:samples                   hash: step -> JSON of attempt, number and bytes (samples.py)
    RUN:samples:{step}            hash: `h:` or `b:` and uid -> head, body; expires as RUN:trajectories:{step}
    RUN:prompts                   hash: step -> JSON of prompt, group and probe (samples.py)
    RUN:facts                     hash: about, labels -> JSON (facts.py)
    RUN:monitor                   hash: step -> state;  RUN:alarms  JSON
    RUN:events                    stream;  RUN:evaluations  stream of those of that kind (events.py)
    RUN:events_sorted             1 once the evaluations of the first stream are in the second one
A step is written in one MULTI under WATCH, so that several services may share a Redis. Aggregates stay for
ever; Redis must append to disk (`appendonly yes`) and must not evict.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import redis

from services.common.errors import EnvironmentLacks
from services.likelihood.metrics.step_metrics import record_metrics
from services.likelihood.monitor.alarms import renamed
from services.likelihood.records import (
    RunInfo,
    StepReceipt,
    StepRecord,
    StoredStep,
    TrajectoryRecord,
    check_run_name,
)
from services.likelihood.store import series
from services.likelihood.store.base import (
    MAX_RUNS,
    MONITOR_SPACING,
    SAMPLE_STEPS,
    NotStored,
    refuse_overfull,
    superseded_error,
)
from services.likelihood.store.redis import address
from services.likelihood.store.redis.events import RedisEvents
from services.likelihood.store.redis.facts import RedisFacts, labels_of
from services.likelihood.store.redis.samples import RedisSamples
from services.likelihood.store.redis.values import NAN_BITS, decoded, pack, unpack

log = logging.getLogger("unspiral.likelihood")
PREFIX = "unspiral"
DAY = 86_400
Client = Any
Pipeline = Any
"""redis-py types each answer as bytes or text. Our connections decode nothing, so all answers are bytes."""


@dataclass
class Replaced:
    """What a write of a higher attempt takes the place of."""

    first: int
    """First step of the writing attempt, this write included."""
    steps: dict[int, int]
    """Stored steps, with their numbers of trajectories."""
    tokens: set[int]
    """Steps whose token arrays go."""
    samples: set[int]
    """Steps whose trajectories token by token go."""


class RedisStore(RedisSamples, RedisFacts, RedisEvents):
    """See LikelihoodStore. Raises EnvironmentLacks if the server does not answer at the start."""

    def __init__(
        self,
        url: str,
        token_steps: int = 8,
        sample_steps: int = SAMPLE_STEPS,
        *,
        trajectory_seconds: int = 30 * DAY,
        token_seconds: int = 2 * DAY,
        timeout_seconds: float = 5.0,
    ):
        self.token_steps = token_steps
        self.sample_steps = sample_steps
        self.trajectory_seconds = trajectory_seconds
        self.token_seconds = token_seconds
        try:
            address.check(url)
            self._redis: Client = redis.Redis.from_url(
                url, socket_timeout=timeout_seconds, socket_connect_timeout=timeout_seconds
            )
            self._redis.connection_pool.make_connection()  # reads the options, and opens nothing
        except (ValueError, TypeError) as e:
            raise address.refused(url, e) from e
        self._shown = address.shown(url)  # no password
        with self._talking():
            self._redis.ping()
            self._warn_if_forgetful()

    def _warn_if_forgetful(self) -> None:
        try:
            settings = self._redis.config_get("appendonly", "maxmemory-policy")
        except redis.ResponseError:  # managed servers hide their configuration
            return
        if settings.get("appendonly") == "no":
            log.warning(
                "redis at %s: appendonly is no, so a restart loses records; start it with --appendonly yes",
                self._shown,
            )
        if settings.get("maxmemory-policy", "noeviction") != "noeviction":
            log.warning("redis at %s: maxmemory-policy must be noeviction, or records vanish", self._shown)

    # ---- writing

    def put_step(self, run: str, record: StepRecord) -> StepReceipt:
        check_run_name(run)
        packed = {t.uid: pack(t) for t in record.trajectories}
        at = self._keys(run)
        step = record.step

        def write(pipe: Pipeline) -> StepReceipt:
            # Until multi() the pipe answers at once, and the watched keys must not change; then it queues.
            gone = self._enter(pipe, run, step, record.attempt)
            old = orjson.loads(pipe.hget(at("steps"), step) or b"null") if step not in gone.steps else None
            held = pipe.hgetall(at("trajectories", step)) if old else {}
            new = {uid: body for uid, body in packed.items() if uid.encode() not in held}
            if old:
                size = sum(map(len, [*held.values(), *new.values()]))
                refuse_overfull(run, step, len(held) + len(new), size)
            everything = [unpack(u, b) for u, b in held.items()]
            everything += [t for t in record.trajectories if t.uid in new]
            posted = {**(old["posted"] if old else {}), **record.metrics}
            derived = record_metrics(everything) if new or not old else old["derived"]
            version = record.policy_version
            if version is None and old:
                version = old["policy_version"]
            body = {
                "attempt": record.attempt,
                "policy_version": version,
                "time": time.time(),
                "posted": posted,
                "derived": derived,
                "trajectories": (old["trajectories"] if old else 0) + len(new),
            }
            pipe.multi()
            self._replace(pipe, run, step, record.attempt, gone)
            if new:
                pipe.incrby(at("count"), len(new))
                pipe.hset(at("trajectories", step), mapping=new)
                pipe.expire(at("trajectories", step), self.trajectory_seconds)
                # Not in the body: earlier versions, beside this one or after it, read no further field.
                counts = [len(everything), len({t.group for t in everything})]
                pipe.hset(at("groups"), step, orjson.dumps(counts))
            pipe.hset(at("steps"), step, orjson.dumps(body))
            pipe.zadd(at("order"), {str(step): step})
            self._set_values(pipe, run, step, {**derived, **posted})
            return StepReceipt(
                run=run, step=step, attempt=record.attempt, stored=len(new), superseded=len(gone.steps)
            )

        return self._transaction(
            write, at("attempts"), at("steps"), at("tokens"), at("samples"), at("trajectories", step)
        )

    def put_tokens(self, run: str, step: int, attempt: int, body: bytes) -> None:
        check_run_name(run)
        at = self._keys(run)

        def write(pipe: Pipeline) -> None:
            gone = self._enter(pipe, run, step, attempt)
            kept = sorted({*map(int, pipe.hkeys(at("tokens"))), step} - gone.tokens)
            pipe.multi()
            self._replace(pipe, run, step, attempt, gone)
            pipe.set(at("tokens", step), body, ex=self.token_seconds)
            pipe.hset(at("tokens"), step, attempt)
            for old in kept[: -self.token_steps]:
                pipe.hdel(at("tokens"), old)
                pipe.delete(at("tokens", old))

        self._transaction(write, at("attempts"), at("steps"), at("tokens"), at("samples"))

    def save_monitor(
        self, run: str, step: int, state: dict[str, Any], alarms: list[dict], phases: Mapping[int, int]
    ) -> None:
        at = self._keys(run)
        with self._talking():
            kept = map(int, self._redis.hkeys(at("monitor")))
            passing = [s for s in kept if s % MONITOR_SPACING or s > step]
            with self._redis.pipeline() as pipe:
                if passing:
                    pipe.hdel(at("monitor"), *passing)
                pipe.hset(at("monitor"), step, orjson.dumps(state))
                pipe.set(at("alarms"), orjson.dumps(alarms))
                for s, code in phases.items():
                    self._set_values(pipe, run, s, {"phase": float(code)})
                pipe.execute()

    def _enter(self, pipe: Pipeline, run: str, step: int, attempt: int) -> Replaced:
        """What of lower attempts this write replaces. Raises `superseded_error`."""
        at = self._keys(run)
        attempts = {int(a): int(s) for a, s in pipe.hgetall(at("attempts")).items()}
        later = [(a, s) for a, s in attempts.items() if a > attempt and s <= step]
        if later:
            raise superseded_error(run, step, attempt, *max(later))
        first = min(step, attempts.get(attempt, step))
        # The usual case, spared the reading of all later steps.
        if not any(a < attempt for a in attempts):
            return Replaced(first, {}, set(), set())
        after = [int(s) for s in pipe.zrangebyscore(at("order"), step, "+inf")]
        bodies = map(orjson.loads, pipe.hmget(at("steps"), after)) if after else ()
        held = dict(zip(after, bodies, strict=True))
        tokens = {int(s): int(a) for s, a in pipe.hgetall(at("tokens")).items()}
        return Replaced(
            first,
            {s: b["trajectories"] for s, b in held.items() if b["attempt"] < attempt},
            {s for s, a in tokens.items() if s >= step and a < attempt},
            {s for s, h in self._held_samples(pipe, at).items() if s >= step and h.attempt < attempt},
        )

    def _touch(self, pipe: Pipeline, run: str) -> None:
        now = time.time()
        pipe.zadd(f"{PREFIX}:runs", {run: now})
        pipe.hsetnx(self._keys(run)("run"), "created", now)
        pipe.hset(self._keys(run)("run"), "updated", now)

    def _replace(self, pipe: Pipeline, run: str, step: int, attempt: int, gone: Replaced) -> None:
        at = self._keys(run)
        self._touch(pipe, run)
        pipe.hset(at("attempts"), attempt, gone.first)
        for s in gone.tokens:
            pipe.hdel(at("tokens"), s)
            pipe.delete(at("tokens", s))
        self._drop_samples(pipe, at, gone.samples)
        if not gone.steps:
            return
        # Not through the pipe, which only queues by now.
        names = [n.decode() for n in self._redis.smembers(at("names"))]
        pipe.decrby(at("count"), sum(gone.steps.values()))
        for s in gone.steps:  # curves keep their length: the steps read as NaN, which is all bits 0 here
            pipe.hdel(at("steps"), s)
            pipe.hdel(at("groups"), s)
            pipe.zrem(at("order"), s)
            pipe.delete(at("trajectories", s))
            chunk, position = series.place(s)
            for name in names:
                pipe.setrange(at("curve", name, chunk), 8 * position, bytes(8))
        for s in filter(lambda s: int(s) >= step, self._redis.hkeys(at("monitor"))):
            pipe.hdel(at("monitor"), s)

    def _set_values(self, pipe: Pipeline, run: str, step: int, values: Mapping[str, float | None]) -> None:
        at = self._keys(run)
        chunk, position = series.place(step)
        if values:
            pipe.sadd(at("names"), *values)
        for name, value in values.items():
            # Redis fills the gap before a value with zero bytes. With the bits of NaN turned over, zero reads
            # as "no value".
            bits = np.float64(np.nan if value is None else value).view(np.uint64) ^ NAN_BITS
            pipe.setrange(at("curve", name, chunk), 8 * position, bits.tobytes())

    # ---- reading

    def get_tokens(self, run: str, step: int) -> bytes | None:
        with self._talking():
            self._known(run)
            body: bytes | None = self._redis.get(self._keys(run)("tokens", step))
        return body

    def runs(self, limit: int = MAX_RUNS) -> list[RunInfo]:
        with self._talking():
            names = self._redis.zrevrange(f"{PREFIX}:runs", 0, limit - 1)
        return [self.info(name.decode()) for name in names]

    def info(self, run: str) -> RunInfo:
        at = self._keys(run)
        with self._talking():
            times = self._known(run)
            with self._redis.pipeline(transaction=False) as pipe:
                pipe.hkeys(at("attempts"))
                pipe.zrange(at("order"), 0, 0)
                pipe.zrange(at("order"), -1, -1)
                pipe.zcard(at("order"))
                pipe.get(at("count"))
                pipe.hget(at("facts"), "labels")
                attempts, first, last, steps, count, labels = pipe.execute()
        return RunInfo(
            run=run, created=float(times[b"created"]), updated=float(times[b"updated"]),
            attempt=max(map(int, attempts), default=0), first_step=int(first[0]) if first else None,
            last_step=int(last[0]) if last else None, steps=steps, trajectories=int(count or 0),
            **labels_of(labels),
        )  # fmt: skip

    def metric_names(self, run: str) -> list[str]:
        with self._talking():
            self._known(run)
            return sorted(n.decode() for n in self._redis.smembers(self._keys(run)("names")))

    def columns(self, run: str, names: Iterable[str], first: int, last: int) -> dict[str, np.ndarray]:
        at = self._keys(run)
        names = list(names)
        chunks = list(range(series.place(first)[0], series.place(max(first, last))[0] + 1))
        with self._talking():
            self._known(run)
            keys = [at("curve", name, chunk) for name in names for chunk in chunks]
            bodies = self._redis.mget(keys) if keys else []
        out = {}
        for i, name in enumerate(names):
            held = zip(chunks, bodies[i * len(chunks) : (i + 1) * len(chunks)], strict=True)
            column = series.dense(((c, decoded(b)) for c, b in held if b), first, last)
            if not np.isnan(column).all():
                out[name] = column
        return out

    def curve(self, run: str, name: str, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        at = self._keys(run)
        with self._talking():
            self._known(run)
            chunks = self._chunks(at("order"), first, last)
            bodies = self._redis.mget([at("curve", name, chunk) for chunk in chunks]) if chunks else []
        held = [(chunk, decoded(body)) for chunk, body in zip(chunks, bodies, strict=True) if body]
        return series.stored(held, first, last)

    def _chunks(self, order: str, first: int, last: int) -> list[int]:
        """Numbers of the chunks that may hold something: all of a short range, those of the stored steps in a
        sparse one."""
        every = range(series.place(first)[0], series.place(max(first, last))[0] + 1)
        if self._redis.zcount(order, first, last) >= len(every):
            return list(every)
        return sorted({series.place(int(step))[0] for step in self._redis.zrangebyscore(order, first, last)})

    def steps(self, run: str, first: int, last: int, limit: int = 1000) -> list[StoredStep]:
        at = self._keys(run)
        with self._talking():
            self._known(run)
            numbers = [int(s) for s in self._redis.zrangebyscore(at("order"), first, last, 0, limit)]
            bodies = self._redis.hmget(at("steps"), numbers) if numbers else []
        out = []
        for step, raw in zip(numbers, bodies, strict=True):
            if raw:  # otherwise superseded between the two reads
                body = orjson.loads(raw)
                metrics = {**body.pop("derived"), **body.pop("posted")}
                body.pop("groups", None)
                out.append(StoredStep(step=step, metrics=metrics, **body))
        return out

    def trajectories(self, run: str, step: int) -> list[TrajectoryRecord]:
        with self._talking():
            self._known(run)
            held = self._redis.hgetall(self._keys(run)("trajectories", step))
        return [unpack(u, held[u]) for u in sorted(held)]

    def trajectory_counts(self, run: str, step: int) -> tuple[int, int]:
        at = self._keys(run)
        with self._talking():
            self._known(run)
            count = self._redis.hlen(at("trajectories", step))
            counted, groups = orjson.loads(self._redis.hget(at("groups"), step) or b"[0, 0]")
        if not count or count == counted:
            return count, groups if count else 0
        return count, len({t.group for t in self.trajectories(run, step)})  # posted to an earlier version

    def load_monitor(self, run: str, before: int) -> tuple[int, dict[str, Any]] | None:
        at = self._keys(run)
        with self._talking():
            steps = [s for s in map(int, self._redis.hkeys(at("monitor"))) if s < before]
            state = self._redis.hget(at("monitor"), max(steps)) if steps else None
        return (max(steps), orjson.loads(state)) if state else None

    def alarms(self, run: str) -> list[dict]:
        with self._talking():
            self._known(run)
            body: bytes | None = self._redis.get(self._keys(run)("alarms"))
        return [renamed(alarm) for alarm in orjson.loads(body or b"[]")]

    def delete_trajectories(self, run: str, below: int) -> int:
        at = self._keys(run)
        with self._talking():
            self._known(run)
            self._drop_samples(self._redis, at, [s for s in self._held_samples(self._redis, at) if s < below])
            steps = [int(s) for s in self._redis.zrangebyscore(at("order"), 0, below - 1)]
            keys = [at("trajectories", s) for s in steps]
            counts = [self._redis.hlen(k) for k in keys]
            if keys:
                self._redis.unlink(*keys)
        return sum(counts)

    def delete_run(self, run: str) -> None:
        with self._talking():
            self._known(run)
            # Not KEYS, which holds up every other client of a large server.
            keys = list(self._redis.scan_iter(match=self._keys(run)("*"), count=1000))
            for at in range(0, len(keys), 1000):
                self._redis.unlink(*keys[at : at + 1000])
            self._redis.zrem(f"{PREFIX}:runs", run)

    def compact(self) -> None:
        """Nothing to do: Redis gives memory back by itself."""

    def ping(self) -> None:
        with self._talking():
            self._redis.ping()

    def close(self) -> None:
        self._redis.close()

    @staticmethod
    def _keys(run: str) -> Callable[..., str]:
        return lambda *parts: ":".join([PREFIX, "run", run, *map(str, parts)])

    def _known(self, run: str) -> dict[bytes, bytes]:
        times: dict[bytes, bytes] = self._redis.hgetall(self._keys(run)("run"))
        if not times:
            raise NotStored(f"run {run[:140]!r}: not in this store")
        return times

    def _transaction(self, write: Callable[[Pipeline], Any], *watched: str) -> Any:
        with self._talking():
            return self._redis.transaction(write, *watched, value_from_callable=True)

    @contextmanager
    def _talking(self) -> Iterator[None]:
        try:
            yield
        except redis.RedisError as e:
            raise EnvironmentLacks(f"likelihood store redis at {self._shown}: {address.why_not(e)}") from e
