"""The learner's weights to the rollout workers, from the driver's side.

    receivers = pool.receivers(v)          who does not hold version v whole
    update = learner.offer_weights(v)      what will come, and where to meet
    learner.send_weights() | pool.sync(update)          at the same time

The group in which they meet is kept for as long as its members stay.

A worker that dies, hangs or fails on the way leaves the pool. Those that were in the same group are sent the
version again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from services.contracts import WeightUpdate
from services.rollout.pool.pool import RolloutPool
from services.weight_sync import GroupBrokenError
from trainer.learner.group import LearnerGroup

T = TypeVar("T")

ATTEMPTS = 3
"""Times that a version is sent before a broken group is an error."""
LOOK_SECONDS = 1.0


async def sync_weights(
    learner: LearnerGroup,
    pool: RolloutPool,
    version: int,
    *,
    on_learner: Callable[..., Awaitable[tuple[Any, float]]],
    on_event: Callable[[dict[str, Any]], None],
    before_sending: Callable[[], Awaitable[None]] | None = None,
) -> WeightUpdate:
    """Give the workers the learner's weights as `version`. Returns what was sent.

    on_learner: runs a learner's call elsewhere and returns its result and seconds. before_sending: awaited
    between the offer and the delivery (`rollout.share_gpus`, where the offer holds the weights whole).

    Raises what either side raises; GroupBrokenError after ATTEMPTS.
    """
    for attempt in range(1, ATTEMPTS + 1):
        receivers = await pool.receivers(version)
        update, _ = await on_learner(learner.offer_weights, version, receivers)
        if before_sending is not None:
            await before_sending()
        # Both outcomes are needed: the one that fails first is not always the one to blame.
        sent, taken = await asyncio.gather(
            on_learner(learner.send_weights), pool.sync(update), return_exceptions=True
        )
        for error in (sent, taken):
            if isinstance(error, BaseException) and not isinstance(error, GroupBrokenError):
                raise error
        if taken is None:
            return update  # every worker that is left holds it, whatever the sender has seen
        on_event(
            {"event": "weights_sent_again", "version": version, "attempt": attempt, "reason": str(taken)}
        )
    raise taken


async def run_with_resync(pool: RolloutPool, work: Awaitable[T], sync: Callable[[], Awaitable[Any]]) -> T:
    """Await `work` of the workers. Where all workers that held the weights are lost, `sync` sends the weights
    to their successors meanwhile; the learner must hold the version in force."""
    task = asyncio.ensure_future(work)
    try:
        # Not `wait_for`, which would cancel the work at each look.
        while not (await asyncio.wait([task], timeout=LOOK_SECONDS))[0]:
            if pool.wants_weights:
                await sync()
        return await task
    finally:  # nobody waits for it any more
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
