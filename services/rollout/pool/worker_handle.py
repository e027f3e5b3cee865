"""A rollout worker as its pool calls it: `WorkerHandle`, and `RayWorkerHandle` for one in a Ray actor."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, Protocol

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup

from services.contracts import Trajectory, TrajectoryRequest, WeightsReceiver, WeightUpdate, WorkerInfo
from services.rollout.errors import WorkerLostError


class WorkerHandle(Protocol):
    """The calls of `services.rollout.worker.worker.RolloutWorker`, which says what each does and raises.

    Each waits at most `timeout_seconds`, then raises TimeoutError, and the call is cancelled in the worker.
    WorkerLostError: the worker or its engine is dead. The worker's other errors arrive as they were raised.
    """

    async def info(self, *, timeout_seconds: float) -> WorkerInfo: ...

    async def start(self, *, timeout_seconds: float) -> WorkerInfo: ...

    async def rollout(self, request: TrajectoryRequest, *, timeout_seconds: float) -> Trajectory: ...

    async def rollout_batch(
        self, requests: list[TrajectoryRequest], *, timeout_seconds: float
    ) -> list[Trajectory]: ...

    async def update_weights(self, update: WeightUpdate, *, timeout_seconds: float) -> int: ...

    async def offer_weights(
        self, receiver: WeightsReceiver, version: int, backend: str, *, timeout_seconds: float
    ) -> WeightUpdate: ...

    async def lend_weights(self, update: WeightUpdate, *, timeout_seconds: float) -> None: ...

    async def logprobs(
        self, token_ids: list[list[int]], temperature: float, *, timeout_seconds: float
    ) -> list[list[float]]: ...

    async def engine_pids(self, *, timeout_seconds: float) -> list[int]: ...

    async def sleep(self, *, timeout_seconds: float) -> None: ...

    async def wake(self, *, timeout_seconds: float) -> None: ...

    async def close(self, *, timeout_seconds: float) -> None: ...

    def stacks(self) -> Any:
        """A Ray reference to a text: the place where each task of the worker waits."""
        ...

    def kill(self) -> None:
        """End the worker's process and give its resources back, whatever state it is in."""
        ...


class RayWorkerHandle:
    """`id` is named in errors. `group` holds the actor's resources, and is given back with it."""

    def __init__(self, id: str, actor: Any, group: PlacementGroup):
        self.id = id
        self.actor = actor
        self._group = group
        self.calls = 0
        """Remote calls made to the worker."""

    async def info(self, *, timeout_seconds: float) -> WorkerInfo:
        return await self._answer(self.actor.info.remote(), timeout_seconds)

    async def start(self, *, timeout_seconds: float) -> WorkerInfo:
        return await self._answer(self.actor.start.remote(), timeout_seconds)

    async def rollout(self, request: TrajectoryRequest, *, timeout_seconds: float) -> Trajectory:
        return await self._answer(self.actor.rollout.remote(request), timeout_seconds)

    async def rollout_batch(
        self, requests: list[TrajectoryRequest], *, timeout_seconds: float
    ) -> list[Trajectory]:
        return await self._answer(self.actor.rollout_batch.remote(requests), timeout_seconds)

    async def update_weights(self, update: WeightUpdate, *, timeout_seconds: float) -> int:
        return await self._answer(self.actor.update_weights.remote(update), timeout_seconds)

    async def offer_weights(
        self, receiver: WeightsReceiver, version: int, backend: str, *, timeout_seconds: float
    ) -> WeightUpdate:
        call = self.actor.offer_weights.remote(receiver, version, backend)
        return await self._answer(call, timeout_seconds)

    async def lend_weights(self, update: WeightUpdate, *, timeout_seconds: float) -> None:
        await self._answer(self.actor.lend_weights.remote(update), timeout_seconds)

    async def logprobs(
        self, token_ids: list[list[int]], temperature: float, *, timeout_seconds: float
    ) -> list[list[float]]:
        return await self._answer(self.actor.logprobs.remote(token_ids, temperature), timeout_seconds)

    async def engine_pids(self, *, timeout_seconds: float) -> list[int]:
        return await self._answer(self.actor.engine_pids.remote(), timeout_seconds)

    async def sleep(self, *, timeout_seconds: float) -> None:
        await self._answer(self.actor.sleep.remote(), timeout_seconds)

    async def wake(self, *, timeout_seconds: float) -> None:
        await self._answer(self.actor.wake.remote(), timeout_seconds)

    async def close(self, *, timeout_seconds: float) -> None:
        await self._answer(self.actor.close.remote(), timeout_seconds)

    def stacks(self) -> Any:
        return self.actor.stacks.remote()

    def kill(self) -> None:
        ray.kill(self.actor)
        # With the resources, its node also ends a process that is stopped and hears nothing; the engine
        # notices that its owner is gone, and ends too.
        ray.util.remove_placement_group(self._group)

    async def _answer(self, ref: Any, timeout_seconds: float) -> Any:
        self.calls += 1
        answer: Awaitable[Any] = asyncio.wrap_future(ref.future())
        try:
            return await asyncio.wait_for(answer, timeout_seconds)
        except RayError as e:
            raise self._error(e) from None
        except (TimeoutError, asyncio.CancelledError):
            ray.cancel(ref)  # otherwise the worker would go on sampling for nobody
            raise

    def _error(self, error: RayError) -> Exception:
        """The worker's own error, or that it is lost: it died, or Ray ended it because memory ran short."""
        if not isinstance(error, RayTaskError):
            return WorkerLostError(f"worker {self.id}: {one_line(error)}")
        cause: Exception = error.cause
        if isinstance(cause, WorkerLostError):
            return WorkerLostError(f"worker {self.id}: {cause}")
        return cause


def one_line(error: BaseException) -> str:
    """An error as `Name: first line`; for an actor that failed in its constructor, the line that says why."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    line = lines[-1] if isinstance(error, ActorDiedError) and "creation task" in lines[0] else lines[0]
    return f"{type(error).__name__}: {line}"[:400]
