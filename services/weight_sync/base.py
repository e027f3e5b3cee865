"""Transports of weights from the learner to the rollout workers: protocols and errors.

    learner rank 0:  update = source.offer(shapes, version, receivers)   what will come, and where to meet
    then, at once:   learner: source.send(named tensors)                 each worker: update_weights(update)

A WeightUpdate is small enough to travel inside one call. `shared_memory` has nothing left to send after the
offer, and its update serves workers that join later too; with `nccl` and `gloo` a later worker takes the
weights from another worker (services/rollout/pool/delivery.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from services.common.errors import EnvironmentLacks, UnspiralError
from services.contracts import WeightsReceiver, WeightUpdate

if TYPE_CHECKING:
    from torch import Tensor

ENVIRONMENT_PREFIXES = ("NCCL_", "GLOO_")
"""Variables that must be the same on both sides, so learner ranks and workers are given the driver's."""


class WeightSyncError(UnspiralError):
    """Weights did not reach a worker, which holds its old version, whole. Raised as it is, they are not those
    of this model: the message names the first that differ."""

    explained = True


class WeightsGoneError(WeightSyncError):
    """The published weights are lost with the learner that published them. The engine was not touched; the
    learner's successor publishes again."""


class GroupMismatchError(WeightSyncError, EnvironmentLacks):
    """Two ranks of a group can't work together; the message prints the difference. Raised by all of them,
    before any weight was sent."""


class GroupBrokenError(WeightSyncError):
    """A rank of the group has gone, has failed, or was late; the message says which, where that is known.
    Sending again may work."""


class HalfWrittenError(GroupBrokenError):
    """The group broke after the first weights were written: the engine may hold half of two versions until a
    whole one arrives."""


def untouched(error: BaseException | None) -> bool:
    """True where an engine whose sync ended with this error still holds its old version whole."""
    return isinstance(error, WeightSyncError) and not isinstance(error, HalfWrittenError)


class Publisher(Protocol):
    """Weights as something that any worker may take at any later time. Runs in the actor of learner rank
    0."""

    def publish(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> WeightUpdate:
        """Send whole weights by their Hugging Face names; tied ones once. Raises WeightSyncError."""
        ...


class Source(Protocol):
    """Weights as something that is sent to a known set of workers. Runs in the actor of learner rank 0, or in
    a worker that lends its own."""

    def offer(
        self,
        weights: Sequence[tuple[str, tuple[int, ...]]],
        version: int,
        receivers: Sequence[WeightsReceiver],
    ) -> WeightUpdate:
        """Say what will be sent, and where to meet. Makes a new group where the receivers are not those of
        the last one."""
        ...

    def send(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Send what was offered last, in its order. Raises GroupMismatchError, GroupBrokenError."""
        ...


class Receiver(Protocol):
    """The worker's side of a Publisher."""

    def receive(self, update: WeightUpdate) -> Path:
        """Take delivery, check it, and return a folder of safetensors files. Raises WeightSyncError,
        WeightsGoneError."""
        ...

    def release(self, folder: Path) -> None:
        """The engine has loaded the folder, or given up: remove it."""
        ...
