"""Trajectories and what they earn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.contracts import Trajectory, TrajectoryRequest
from services.rollout.pool.pool import RolloutPool
from trainer.config.schema import RewardSettings
from trainer.rewards import Reward
from trainer.rewards.calls import Batch, RewardCalls

OnDone = Callable[[Trajectory], None]


def calls_of(reward: Reward, settings: RewardSettings) -> RewardCalls:
    """As the settings of a run have them."""
    return RewardCalls(reward, settings.kind, settings.timeout_seconds, concurrency=settings.concurrency)


async def sampled_and_scored(
    pool: RolloutPool, requests: list[TrajectoryRequest], calls: RewardCalls, on_done: OnDone | None = None
) -> tuple[list[Trajectory], list[float]]:
    """The trajectories of all requests and their rewards, in the order of the requests.

    With a `reward.concurrency` of 1 the function is called in that order, once all are sampled; otherwise
    for each as soon as it is sampled, so that a service is asked while others are sampled still.
    """
    if calls.concurrency == 1:
        trajectories = await pool.rollout(requests, on_done=on_done)
        return trajectories, await calls.of(trajectories)
    batch = Batch(len(requests))

    def sampled(trajectory: Trajectory) -> None:
        calls.begin(trajectory, batch)
        if on_done is not None:
            on_done(trajectory)

    sampling = asyncio.create_task(pool.rollout(requests, on_done=sampled))
    try:
        # A reward that fails ends the run at once: what is sampled after it is of no use.
        while not (await asyncio.wait({sampling}, timeout=calls.look_seconds))[0]:
            calls.check(batch.begun.values())
        return sampling.result(), await calls.of(sampling.result(), batch)
    finally:
        batch.leave()
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)
