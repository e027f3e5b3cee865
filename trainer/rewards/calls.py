"""Calls of a reward function, `reward.concurrency` at a time, each with a time limit.

Python cannot end a thread. A call that is late goes on in a daemon thread, which keeps no process from its
end; its result is not waited for, and whoever asked gets an error.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from services.common.counting import counted
from services.common.errors import UserError
from services.common.processes.daemon_threads import DaemonThreads
from services.contracts import Trajectory
from trainer.rewards import Reward

_LOOK_SECONDS = 1.0
"""Longest time between two looks at the calls in hand."""


@dataclass
class Batch:
    """Trajectories that are scored together."""

    size: int
    done: int = 0
    """Calls that have returned."""
    begun: dict[str, Future[float]] = field(default_factory=dict)
    """Calls that `RewardCalls.begin` has made, by the uids of their trajectories."""

    def leave(self) -> None:
        """For one that nobody waits for any more: no further call of it is made."""
        for future in self.begun.values():
            future.cancel()


@dataclass(frozen=True)
class CallInHand:
    """A call of the reward function that has not returned."""

    uid: str
    """Of its trajectory."""
    batch: Batch
    began: float
    """time.monotonic()."""


class RewardCalls:
    """Calls a reward function in threads of its own. With a concurrency of 1 that is for one trajectory after
    the other, always in the same thread: the function need not be made for several."""

    def __init__(
        self,
        reward: Reward,
        kind: str,
        timeout_seconds: float,
        key: str | None = "reward.timeout_seconds",
        concurrency: int = 1,
    ) -> None:
        """kind: `reward.kind`, for the error; timeout_seconds: longest time of one call, key: where it is
        set; concurrency: most calls at a time, of all batches together."""
        self.reward = reward
        self.kind = kind
        self.timeout_seconds = timeout_seconds
        self.concurrency = concurrency
        self.limit = f"{key}={timeout_seconds:g}" if key else f"{timeout_seconds:g} s"
        self.look_seconds = min(_LOOK_SECONDS, timeout_seconds / 5)
        """Time between two looks of one that waits (`check`)."""
        self.returned = 0
        """Calls that have returned."""
        self.waited = 0.0
        """Seconds in `of`, of all batches."""
        self._counting = threading.Lock()
        self._threads: DaemonThreads | None = None
        self._in_hand: dict[int, CallInHand] = {}
        """The longest first."""
        self._late: UserError | None = None

    async def of(self, trajectories: list[Trajectory], batch: Batch | None = None) -> list[float]:
        """The reward of each, NaN where the function returned None. Raises what the function raises, and
        UserError where a call takes longer than the limit.

        batch: of calls that may have begun; those are not made again."""
        if self._late:
            raise self._late
        batch = batch or Batch(len(trajectories))
        began = time.monotonic()  # before the first call, which may have returned when the last one begins
        futures = [
            batch.begun.pop(t.uid) if t.uid in batch.begun else self._submitted(t, batch)
            for t in trajectories
        ]
        # Each of its own: a result that comes after we have left is none that nobody looks at.
        waits = [asyncio.wrap_future(future) for future in futures]
        left = set(waits)
        try:
            while left:
                _, left = await asyncio.wait(
                    left, timeout=self.look_seconds, return_when=asyncio.FIRST_EXCEPTION
                )
                self.check(futures)
            return [wait.result() for wait in waits]
        finally:
            self.waited += time.monotonic() - began
            for wait, future in zip(waits, futures, strict=True):
                if wait.done() and not wait.cancelled():
                    wait.exception()  # one is raised: asyncio is not to complain about the others
                wait.cancel()
                future.cancel()  # at once: no further call is made

    def begin(self, trajectory: Trajectory, batch: Batch) -> None:
        """Call it for a trajectory of a batch that `of` is given later, or that is left."""
        batch.begun[trajectory.uid] = self._submitted(trajectory, batch)

    def check(self, futures: Iterable[Future[float]]) -> None:
        """Raise what one of these calls has raised, or UserError where a call in hand is late."""
        for future in futures:
            if future.done() and not future.cancelled() and (error := future.exception()):
                raise error
        for call in list(self._in_hand.values()):
            if self._late is None and time.monotonic() - call.began > self.timeout_seconds:
                self._late = UserError(
                    f"reward.kind {self.kind!r}: on trajectory {call.uid}: no result within {self.limit}"
                )
        if self._late:
            raise self._late

    def close(self) -> None:
        """End the threads, once their calls have returned. They would wait for others as long as the process
        lives."""
        if self._threads is not None:
            self._threads.close()
            self._threads = None

    def waits_for(self) -> str:
        """The calls in hand, in one line; "" where there are none."""
        calls = list(self._in_hand.values())
        if not calls:
            return ""
        longest = calls[0]
        others = f" and {counted(len(calls) - 1, 'other')}" if len(calls) > 1 else ""
        return (
            f"reward.kind {self.kind!r} on trajectory {longest.uid} for "
            f"{time.monotonic() - longest.began:.0f} s{others} "
            f"({longest.batch.done} of {longest.batch.size} done)"
        )

    def _submitted(self, trajectory: Trajectory, batch: Batch) -> Future[float]:
        if self._threads is None:
            self._threads = DaemonThreads(self.concurrency, "rewards")
        return self._threads.submit(partial(self._called, trajectory, batch))

    def _called(self, trajectory: Trajectory, batch: Batch) -> float:
        call = CallInHand(trajectory.uid, batch, time.monotonic())
        self._in_hand[id(call)] = call
        try:
            value = self.reward(trajectory)
        finally:
            del self._in_hand[id(call)]
        with self._counting:
            self.returned += 1
            batch.done += 1
        return math.nan if value is None else float(value)
