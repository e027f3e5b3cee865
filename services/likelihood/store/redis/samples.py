"""Sampled trajectories in the Redis store.

The hash of a step holds two fields per trajectory, `h:` and `b:` before its uid: the head, which a list of
heads reads, and the deflated body.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, NamedTuple

import orjson

from services.likelihood.microscope.heads import SampleHead
from services.likelihood.microscope.packing import (
    PackedSample,
    packed,
    prompt_groups,
    prompt_groups_of,
    refuse_overfull,
    unpacked,
    unpacked_head,
)
from services.likelihood.microscope.prompts import (
    MOST_PROMPTS,
    KeptPrompt,
    PromptGroup,
    joined,
    kept_prompts,
)
from services.likelihood.microscope.record import SampledTrajectory
from services.likelihood.records import check_run_name
from services.likelihood.store.kept_samples import steps_to_drop
from services.likelihood.store.redis.part import Keys, RedisPart

HEAD = "h:"
BODY = "b:"


class HeldStep(NamedTuple):
    """The trajectories that are kept of a step."""

    attempt: int
    trajectories: int
    size: int
    """Bytes of their heads and bodies."""


class RedisSamples(RedisPart):
    """The part of the Redis store that keeps trajectories token by token."""

    sample_steps: int
    trajectory_seconds: int

    @abstractmethod
    def alarms(self, run: str) -> list[dict]: ...

    @abstractmethod
    def _enter(self, pipe: Any, run: str, step: int, attempt: int) -> Any: ...

    @abstractmethod
    def _replace(self, pipe: Any, run: str, step: int, attempt: int, gone: Any) -> None: ...

    def put_samples(self, run: str, step: int, attempt: int, trajectories: list[SampledTrajectory]) -> int:
        """See LikelihoodStore."""
        check_run_name(run)
        at = self._keys(run)
        rows = {row.uid: row for row in map(packed, trajectories)}
        place = at("samples", step)

        def write(pipe: Any) -> int:
            gone = self._enter(pipe, run, step, attempt)
            held = {s: h for s, h in self._held_samples(pipe, at).items() if s not in gone.samples}
            old = held.get(step, HeldStep(attempt, 0, 0))
            names = list(rows)
            there = pipe.hmget(place, [HEAD + uid for uid in names]) if names and old.trajectories else []
            known = {uid for uid, head in zip(names, there, strict=False) if head is not None}
            new = [row for uid, row in rows.items() if uid not in known]
            size = old.size + sum(row.size for row in new)
            refuse_overfull(run, step, old.trajectories + len(new), size)
            held[step] = HeldStep(attempt, old.trajectories + len(new), size)
            alarms = orjson.loads(pipe.get(at("alarms")) or b"[]")
            asked = self._prompts_of_step(pipe, at, step) if old.trajectories else []
            prompts = joined(asked, prompt_groups(new))
            pipe.multi()
            self._replace(pipe, run, step, attempt, gone)
            pipe.hset(at("samples"), step, orjson.dumps(list(held[step])))
            pipe.hset(at("prompts"), step, orjson.dumps(prompts))
            if new:
                pipe.hset(place, mapping=_fields(new))
                pipe.expire(place, self.trajectory_seconds)
            self._drop_samples(pipe, at, steps_to_drop(held, self.sample_steps, alarms))
            return len(new)

        watched = ("attempts", "steps", "tokens", "samples")
        stored: int = self._transaction(write, *map(at, watched), place)
        return stored

    def sample_heads(self, run: str, step: int) -> list[SampleHead]:
        """See LikelihoodStore."""
        with self._talking():
            self._known(run)
            found = self._heads(self._redis, self._keys(run), step)
        return [unpacked_head(head) for head in found.values()]

    def samples(self, run: str, step: int, group: str | None = None) -> list[SampledTrajectory]:
        """See LikelihoodStore."""
        at = self._keys(run)
        with self._talking():
            self._known(run)
            heads = self._heads(self._redis, at, step)
            of_group = (uid for uid, head in heads.items() if group in (None, orjson.loads(head)["group"]))
            names = [BODY + uid for uid in of_group]
            found = self._redis.hmget(at("samples", step), names) if names else []
        return [unpacked(body) for body in found if body]

    def sampled_steps(self, run: str) -> dict[int, int]:
        """See LikelihoodStore."""
        with self._talking():
            self._known(run)
            held = self._held_samples(self._redis, self._keys(run))
        return {step: held[step].trajectories for step in sorted(held)}

    def prompts(self, run: str, limit: int = MOST_PROMPTS) -> list[KeptPrompt]:
        """See LikelihoodStore."""
        return kept_prompts(self._prompts(run), limit)

    def prompt_groups(self, run: str, prompt: str) -> dict[int, list[str]]:
        """See LikelihoodStore."""
        found = self._prompts(run)
        groups = {step: [g for p, g, _ in found[step] if p == prompt] for step in sorted(found)}
        return {step: of_step for step, of_step in groups.items() if of_step}

    def _prompts(self, run: str) -> dict[int, list[PromptGroup]]:
        """Of the steps that hold trajectories. Steps that were kept before their prompts were noted gain
        them here."""
        at = self._keys(run)
        with self._talking():
            self._known(run)
            held = self._held_samples(self._redis, at)
            noted = self._redis.hgetall(at("prompts"))
            found = {int(step): orjson.loads(body) for step, body in noted.items() if int(step) in held}
            for step in held.keys() - found.keys():
                found[step] = self._prompts_of_step(self._redis, at, step)
                # A post to the step in the meantime has written more than was read here: it stays.
                self._redis.hsetnx(at("prompts"), step, orjson.dumps(found[step]))
        return found

    def _prompts_of_step(self, pipe: Any, at: Keys, step: int) -> list[PromptGroup]:
        noted = pipe.hget(at("prompts"), step)
        if noted is not None:
            found: list[PromptGroup] = orjson.loads(noted)
            return found
        return prompt_groups_of(self._heads(pipe, at, step).values())

    @staticmethod
    def _heads(pipe: Any, at: Keys, step: int) -> dict[str, bytes]:
        """The heads of a step by uid, in order."""
        place = at("samples", step)
        names = sorted(name for name in pipe.hkeys(place) if name.startswith(HEAD.encode()))
        found = zip(names, pipe.hmget(place, names) if names else (), strict=True)
        return {name.decode().removeprefix(HEAD): head for name, head in found if head is not None}

    @staticmethod
    def _held_samples(pipe: Any, at: Keys) -> dict[int, HeldStep]:
        found = pipe.hgetall(at("samples"))
        return {int(step): HeldStep(*orjson.loads(body)) for step, body in found.items()}

    @staticmethod
    def _drop_samples(pipe: Any, at: Keys, gone: Iterable[int]) -> None:
        for step in gone:
            pipe.hdel(at("samples"), step)
            pipe.hdel(at("prompts"), step)
            pipe.unlink(at("samples", step))


def _fields(rows: list[PackedSample]) -> dict[str, bytes]:
    heads = {HEAD + row.uid: row.head for row in rows}
    return heads | {BODY + row.uid: row.body for row in rows}
