"""Asking: all workers are kept busy over all sets, and each answer is written as it comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from retriever_service.client import Hit
from services.contracts import Trajectory, TrajectoryRequest
from services.rollout.pool.pool import JOBS_PER_WORKER
from trainer.loop.rollouts.sampling import seed_of
from trainer.suite.rows import GREEDY, AnswersFile, Asked, row_of

BATCH = 16
"""Questions that one worker answers together in deterministic mode, where the rows of a batch decide the last
bits."""
SAY_SECONDS = 10.0
"""Between two lines of progress."""
Retrieve = Callable[[str], Awaitable[list[Hit]]]
"""Hits of a question, best first."""


class Pool(Protocol):
    """The part of `services.rollout.pool.pool.RolloutPool` that is used."""

    @property
    def target(self) -> int: ...

    async def rollout(self, requests: list[TrajectoryRequest]) -> list[Trajectory]: ...


@dataclass(frozen=True)
class Sampling:
    """How answers are sampled."""

    seed: int
    temperature: float
    """Of the samples that are not greedy."""
    deterministic: bool
    """`rollout.deterministic`: batches are the same whatever is answered already and however many workers
    there are, so that the answers are the same to the letter."""
    retriever_url: str | None = None
    """Another retriever than the workers' own."""
    untagged: bool = False
    """Whether a text without tags is an answer as a whole."""


class Asking:
    """Answers a plan. Rows that the file holds already are not asked again.

    retrieve: for a method that puts documents into the prompt; otherwise None.
    """

    def __init__(
        self,
        pool: Pool,
        answers: AnswersFile,
        plan: list[Asked],
        sampling: Sampling,
        retrieve: Retrieve | None,
        say: Callable[[str], None],
    ):
        self._pool = pool
        self._answers = answers
        self._plan = plan
        self._sampling = sampling
        self._retrieve = retrieve
        self._say = say
        self._left = sum(asked.key not in answers.kept for asked in plan)
        self._right = sum(row["scores"]["em"] for key, row in answers.kept.items() if key[1] == GREEDY)
        self._greedy = sum(key[1] == GREEDY for key in answers.kept)
        self._began = time.monotonic()
        self._said = self._began
        self.done = 0
        """Rows that were written here."""

    async def run(self) -> None:
        """Returns when the file holds every row of the plan. Raises what the pool and the retriever raise;
        the rows that were written stay."""
        kept = len(self._plan) - self._left
        if kept:
            self._say(f"{kept:,} of {len(self._plan):,} answers are there already")
        self._began = time.monotonic()
        if self._sampling.deterministic:
            await self._in_fixed_batches()
        else:
            await self._as_workers_are_free()

    async def _as_workers_are_free(self) -> None:
        """A bounded number of questions is on its way; the next one follows whichever comes back first."""
        waiting = iter([asked for asked in self._plan if asked.key not in self._answers.kept])
        running: set[asyncio.Task[None]] = set()
        try:
            while True:
                # More than the workers can hold, so that none waits for this loop; asked anew, since workers
                # come and go.
                room = 2 * JOBS_PER_WORKER * max(1, self._pool.target) - len(running)
                running |= {asyncio.create_task(self._one(asked)) for asked in _first(waiting, room)}
                if not running:
                    return
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                failures = [error for task in done if (error := task.exception()) is not None]
                if failures:
                    raise failures[0]
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _one(self, asked: Asked) -> None:
        hits = await self._hits(asked)
        (trajectory,) = await self._pool.rollout([self._request(asked, hits, group=asked.item.key)])
        self._keep(asked, trajectory, hits)
        self._tell()

    async def _in_fixed_batches(self) -> None:
        """As many batches at a time as there are workers, each on a worker of its own: requests of one group
        go to one worker, and groups go round the workers."""
        batches = [self._plan[i : i + BATCH] for i in range(0, len(self._plan), BATCH)]
        lacking = [b for b in batches if any(asked.key not in self._answers.kept for asked in b)]
        width = max(1, self._pool.target)
        for start in range(0, len(lacking), width):
            together = [asked for batch in lacking[start : start + width] for asked in batch]
            groups = [
                f"batch-{start + i}" for i, batch in enumerate(lacking[start : start + width]) for _ in batch
            ]
            hits = await asyncio.gather(*map(self._hits, together))
            requests = [
                self._request(asked, found, group=group)
                for asked, found, group in zip(together, hits, groups, strict=True)
            ]
            trajectories = await self._pool.rollout(requests)
            for asked, trajectory, found in zip(together, trajectories, hits, strict=True):
                if asked.key not in self._answers.kept:
                    self._keep(asked, trajectory, found)
            self._tell()

    async def _hits(self, asked: Asked) -> list[Hit] | None:
        if self._retrieve is None:
            return None
        return list(await self._retrieve(asked.item.question.text))

    def _request(self, asked: Asked, hits: list[Hit] | None, group: str) -> TrajectoryRequest:
        uid = f"suite-{asked.sample}-{asked.item.key}"
        question = asked.item.question
        if hits is not None:
            question = replace(question, context=tuple(hit.contents for hit in hits))
        temperature = 0.0 if asked.sample == GREEDY else self._sampling.temperature
        seed = seed_of(self._sampling.seed, uid)
        return TrajectoryRequest(uid, group, question, seed, temperature, self._sampling.retriever_url)

    def _keep(self, asked: Asked, trajectory: Trajectory, hits: list[Hit] | None) -> None:
        documents = None if hits is None else [hit.id for hit in hits]
        row = row_of(asked, trajectory, documents, untagged=self._sampling.untagged)
        self._answers.add(row)
        self.done += 1
        self._left -= 1
        if asked.sample == GREEDY:
            self._greedy += 1
            self._right += row["scores"]["em"]

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self._said >= SAY_SECONDS or not self._left:
            self._said = now
            self._say(self.line(now))

    def line(self, now: float) -> str:
        """Progress, speed, time left, and the greedy EM so far."""
        total = len(self._plan)
        speed = self.done / max(1e-9, now - self._began)
        # The first of those that are on their way together say nothing of the speed.
        known = self.done >= BATCH
        left = f", {_duration(self._left / speed)} left" if self._left and known else ""
        em = f"; EM so far {self._right / self._greedy:.3f}" if self._greedy else ""
        return f"{total - self._left:,} of {total:,} answered, {speed:.1f} per s{left}{em}"


def _first(items: Iterator[Asked], count: int) -> list[Asked]:
    return [item for _, item in zip(range(count), items, strict=False)]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
