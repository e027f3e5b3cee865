"""A worker in the pool: its handle, its state, what it runs. And a trajectory that waits for one."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field, replace

from services.contracts import Trajectory, TrajectoryRequest, WorkerInfo
from services.rollout.errors import WorkerLostError
from services.rollout.pool.worker_handle import WorkerHandle
from services.worker_state import WorkerState


@dataclass(eq=False)
class Member:
    """A worker in the pool. A new one in the same slot is a new member."""

    slot: int
    id: str
    worker: WorkerHandle
    info: WorkerInfo
    """Its last answer to a ping."""
    state: WorkerState = WorkerState.STARTING
    """Changed by `become` alone."""
    version: int = 0
    """The newest version of the weights that it held whole."""
    gpus: float = 0.0
    """GPUs reserved for it."""
    jobs: dict[str, asyncio.Task] = field(default_factory=dict)
    """Calls of the worker that run, by the uid of their (first) trajectory."""
    batch: int = 0
    """Trajectories of the one call that a deterministic run makes; 0 where each has a call of its own."""
    outstanding_tokens: float = 0.0
    timeouts: int = 0
    """Trajectories that ran past their deadline since one was finished."""
    trajectories: int = 0
    """Trajectories that it has finished."""
    lost: WorkerLostError | None = None

    @property
    def running(self) -> int:
        """Trajectories that it samples now."""
        return self.batch or len(self.jobs)

    def become(self, state: WorkerState) -> None:
        """Raises RuntimeError where the table of `services.worker_state` has no such transition."""
        self.state = self.state.to(state)

    def describe(self) -> WorkerInfo:
        return replace(
            self.info,
            policy_version=self.version,
            outstanding_tokens=round(self.outstanding_tokens),
            state=self.state,
            trajectories=self.trajectories,
        )


@dataclass(eq=False)
class Job:
    """One trajectory to be sampled, until its future is done. Jobs with the same `home` key share a worker
    (its prefix cache)."""

    request: TrajectoryRequest
    future: asyncio.Future[Trajectory]
    home: tuple[str, int]
    attempts: int = 0
    avoid: Member | None = None
    """The worker that failed it last; another is preferred."""


async def wait_at_most(event: asyncio.Event, seconds: float) -> None:
    """Return once the event is set, or after `seconds`."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
