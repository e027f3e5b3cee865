"""Calls of a reward function, each with a time limit.

Python cannot end a thread. A call that is late goes on in a daemon thread, which keeps no process from its
end; its result is not waited for, and whoever asked gets an error.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue

from services.common.errors import UserError
from services.contracts import Trajectory
from trainer.rewards import Reward

_LOOK_SECONDS = 1.0
"""Longest time between two looks at the call in hand."""


@dataclass(frozen=True)
class CallInHand:
    """A call of the reward function that has not returned."""

    uid: str
    """Of its trajectory."""
    number: int
    """Its place in the batch, from 1 on."""
    size: int
    """Trajectories of the batch."""
    began: float
    """time.monotonic()."""


@dataclass
class Batch:
    """Trajectories to score in order, and their rewards to come."""

    trajectories: list[Trajectory]
    rewards: Future[list[float]] = field(default_factory=Future)


class RewardCalls:
    """Calls a reward function for one trajectory after the other, always in the same thread: it need not be
    made for several."""

    def __init__(
        self, reward: Reward, kind: str, timeout_seconds: float, key: str | None = "reward.timeout_seconds"
    ) -> None:
        """kind: `reward.kind`, for the error; timeout_seconds: longest time of one call, key: where it is
        set."""
        self.reward = reward
        self.kind = kind
        self.timeout_seconds = timeout_seconds
        self.limit = f"{key}={timeout_seconds:g}" if key else f"{timeout_seconds:g} s"
        self.returned = 0
        """Calls that have returned."""
        self._batches: SimpleQueue[Batch | None] = SimpleQueue()
        """None: the end."""
        self._thread: threading.Thread | None = None
        self._call: CallInHand | None = None
        self._late: UserError | None = None

    async def of(self, trajectories: list[Trajectory]) -> list[float]:
        """The reward of each, NaN where the function returned None. Raises what the function raises, and
        UserError where a call takes longer than the limit."""
        if self._late:
            raise self._late
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="rewards", daemon=True)
            self._thread.start()
        batch = Batch(trajectories)
        self._batches.put(batch)
        rewards = asyncio.wrap_future(batch.rewards)
        look = min(_LOOK_SECONDS, self.timeout_seconds / 5)
        try:
            while not (await asyncio.wait({rewards}, timeout=look))[0]:
                self._check()
            return rewards.result()
        finally:
            rewards.cancel()  # where nobody waits any more: no further call is made

    def close(self) -> None:
        """End the thread, once the call in hand has returned. It would wait for batches as long as the
        process lives."""
        if self._thread is not None:
            self._batches.put(None)
            self._thread = None

    def waits_for(self) -> str:
        """The call in hand, in one line; "" where none is."""
        call = self._call
        if call is None:
            return ""
        return f"reward.kind {self.kind!r} on trajectory {call.uid} ({call.number} of {call.size})"

    def _check(self) -> None:
        call = self._call
        if self._late is None and call and time.monotonic() - call.began > self.timeout_seconds:
            self._late = UserError(
                f"reward.kind {self.kind!r}: on trajectory {call.uid}: no result within {self.limit}"
            )
        if self._late:
            raise self._late

    def _work(self) -> None:
        while self._late is None:
            batch = self._batches.get()
            if batch is None:
                return
            try:
                found = self._scored(batch)
            except BaseException as error:  # for the one who asked, whatever the function raised
                if batch.rewards.set_running_or_notify_cancel():
                    batch.rewards.set_exception(error)
            else:
                if batch.rewards.set_running_or_notify_cancel():
                    batch.rewards.set_result(found)

    def _scored(self, batch: Batch) -> list[float]:
        found: list[float] = []
        size = len(batch.trajectories)
        for number, trajectory in enumerate(batch.trajectories, 1):
            if batch.rewards.cancelled():
                break
            self._call = CallInHand(trajectory.uid, number, size, time.monotonic())
            try:
                value = self.reward(trajectory)
            finally:
                self._call = None
            if self._late:
                break
            self.returned += 1
            found.append(math.nan if value is None else float(value))
        return found
