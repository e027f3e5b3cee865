"""A worker as the pool sees it: its actor, what it holds, what it runs."""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from services.contracts import Trajectory, TrajectoryRequest, WorkerInfo


@dataclass(eq=False)
class Job:
    """One trajectory to be sampled, until its future is done."""

    request: TrajectoryRequest
    future: asyncio.Future[Trajectory]
    attempts: int = 0
    avoid: Member | None = None
    """The worker that failed it last; another is preferred."""


@dataclass(eq=False)
class Member:
    """A worker in the pool."""

    slot: int
    id: str
    actor: Any
    info: WorkerInfo
    state: str = "starting"
    version: int = 0
    jobs: dict[str, asyncio.Task] = field(default_factory=dict)
    """Running trajectories by uid."""
    outstanding_tokens: float = 0.0
    heard: float = 0.0
    """When it last answered, on the event loop's clock."""
    calls: int = 0
    """RPCs made to it."""

    async def call(self, method: str, *args, timeout_seconds: float | None = None) -> Any:
        """One RPC. Raises TimeoutError; a call that is cancelled or late is cancelled in the worker too."""
        self.calls += 1
        ref = getattr(self.actor, method).remote(*args)
        try:
            answer = await asyncio.wait_for(asyncio.wrap_future(ref.future()), timeout_seconds)
        except (TimeoutError, asyncio.CancelledError):
            ray.cancel(ref)
            raise
        self.heard = asyncio.get_running_loop().time()
        return answer

    def kill(self) -> None:
        """End the actor's process, also where it no longer listens."""
        self.state = "failed"
        ray.kill(self.actor, no_restart=True)
        if self.info.pid and self.info.node == socket.gethostname():
            try:
                os.kill(self.info.pid, 9)
            except ProcessLookupError:
                return

    def describe(self) -> WorkerInfo:
        return replace(
            self.info, policy_version=self.version, outstanding_tokens=round(self.outstanding_tokens), state=self.state
        )
