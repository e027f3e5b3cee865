"""A worker as the pool sees it: its actor, what it holds, what it runs. And a trajectory that waits for
one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup

from services.contracts import Trajectory, TrajectoryRequest, WorkerInfo
from services.rollout.errors import EngineDeadError, WorkerLostError
from services.rollout.pool.placement import release

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Member:
    """A worker in the pool. A new one in the same slot is a new member."""

    slot: int
    id: str
    group: PlacementGroup
    actor: Any
    info: WorkerInfo
    state: str = "starting"
    version: int = 0
    gpus: float = 0.0
    """GPUs reserved for it."""
    jobs: dict[str, asyncio.Task] = field(default_factory=dict)
    """Running trajectories by uid."""
    outstanding_tokens: float = 0.0
    calls: int = 0
    """RPCs made to it."""
    timeouts: int = 0
    """Trajectories that ran past their deadline since one was finished."""
    trajectories: int = 0
    """That it has finished."""
    lost: WorkerLostError | None = None

    async def call(self, method: str, *args, timeout_seconds: float) -> Any:
        """One RPC; the worker's own exceptions arrive as they were raised there.

        Raises WorkerLostError, and TimeoutError (the call is then cancelled in the worker too).
        """
        self.calls += 1
        ref = getattr(self.actor, method).remote(*args)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(ref.future()), timeout_seconds)
        except RayTaskError as e:
            cause = e.cause
            if isinstance(cause, EngineDeadError):
                raise WorkerLostError(f"worker {self.id}: {cause}") from None
            raise cause from None
        except RayError as e:  # it died, or Ray ended it because memory ran short
            raise WorkerLostError(f"worker {self.id}: {one_line(e)}") from None
        except (TimeoutError, asyncio.CancelledError):
            ray.cancel(ref)
            raise

    def end(self) -> None:
        """End the actor and give its resources back. With those its node ends the process, also one that is
        stopped and hears nothing; the engine notices, and ends too."""
        ray.kill(self.actor)
        release(self.group)

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


def noted(on_event: Callable[[dict], None]) -> Callable[[dict], None]:
    """The same, but where a full disk takes no event that is logged: the trajectory or worker that it is
    about must not be lost with it."""

    def note(event: dict) -> None:
        try:
            on_event(event)
        except OSError as e:
            _log.warning("%s was not noted: %s", event, e)

    return note


def one_line(error: BaseException) -> str:
    """An error as `Name: first line`; for an actor that failed in its constructor, the line that says why."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    line = lines[-1] if isinstance(error, ActorDiedError) and "creation task" in lines[0] else lines[0]
    return f"{type(error).__name__}: {line}"[:400]
