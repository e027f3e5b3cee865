"""The rate at a steady load: so many trajectories in flight at a time, and the tokens that are written while
all places are taken."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import NamedTuple

from benchmarks.gpu.watch import BusyShare
from services.contracts import Trajectory, TrajectoryRequest
from services.rollout.worker.worker import RolloutWorker


class Life(NamedTuple):
    """When a trajectory began and ended, on the host's monotonic clock, which its processes share."""

    began: float
    ended: float
    tokens: int


class Window(NamedTuple):
    """From the moment when the last place is taken until the last trajectory begins."""

    first: float
    last: float


def tokens_of(trajectory: Trajectory) -> int:
    return sum(len(a.token_ids) for a in trajectory.actions)


def rate_within(lives: Iterable[Life], windows: Iterable[Window | None]) -> float | None:
    """Tokens per second in the time that all windows have in common; None where they have none. A trajectory
    that lives on both sides of an edge counts by the share of its life within, as if its tokens came
    evenly."""
    known = list(windows)
    if None in known:
        return None
    first, last = max(w.first for w in known if w), min(w.last for w in known if w)
    if last <= first:
        return None
    within = sum(
        life.tokens
        * max(0.0, min(life.ended, last) - max(life.began, first))
        / max(life.ended - life.began, 1e-9)
        for life in lives
    )
    return within / (last - first)


class Steady:
    """Trajectories of which so many are in flight at a time. `busy` looks at the GPU while all places are
    taken."""

    def __init__(self, count: int, places: int, busy: BusyShare | None = None) -> None:
        self._count = count
        self._places = places
        self._busy = busy
        self._began: list[float] = []
        self.lives: list[Life] = []

    async def run(self, worker: RolloutWorker, batch: list[TrajectoryRequest]) -> list[Trajectory]:
        places = asyncio.Semaphore(self._places)

        async def one(request: TrajectoryRequest) -> Trajectory:
            async with places:
                began = time.monotonic()
                self._began.append(began)
                if self._busy and len(self._began) == self._places < self._count:
                    self._busy.__enter__()
                if self._busy and len(self._began) == self._count > self._places:
                    self._busy.__exit__()
                trajectory = await worker.rollout(request)
                self.lives.append(Life(began, time.monotonic(), tokens_of(trajectory)))
                return trajectory

        return list(await asyncio.gather(*map(one, batch)))

    @property
    def window(self) -> Window | None:
        """None where no trajectory waited for a place."""
        if self._count <= self._places or len(self._began) < self._count:
            return None
        return Window(self._began[self._places - 1], self._began[-1])

    def numbers(self) -> dict[str, float | None]:
        """Empty where the places were never all taken for long enough."""
        rate = rate_within(self.lives, [self.window])
        if rate is None:
            return {}
        return {"steady_tokens_per_s": rate, "steady_busy": self._busy.mean if self._busy else None}
