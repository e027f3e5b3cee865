"""How weights go from the learner to the rollout workers: what a transport is.

    learner rank 0:  publisher.publish(named tensors, version) -> WeightUpdate
    each worker:     receiver.receive(update) -> folder -> engine loads it -> receiver.release(folder)

A WeightUpdate is small enough to travel inside one call. A worker that joins late is given the current one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from services.contracts import WeightUpdate

if TYPE_CHECKING:
    from torch import Tensor


class WeightSyncError(RuntimeError):
    """Weights did not reach a worker."""

    exit_code = 1


class WeightMismatchError(WeightSyncError):
    """The weights sent are not those of this model; the message names the first that differ. The engine was not touched."""


class Publisher(Protocol):
    """Runs in the actor of learner rank 0."""

    def publish(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> WeightUpdate:
        """Send whole weights by their Hugging Face names; tied ones once. Raises WeightSyncError."""
        ...


class Receiver(Protocol):
    """Runs in the rollout worker's actor."""

    def receive(self, update: WeightUpdate) -> Path:
        """Take delivery, check it, and return a folder of safetensors files. Raises WeightMismatchError, WeightSyncError."""
        ...

    def release(self, folder: Path) -> None:
        """The engine has loaded the folder, or given up: remove it."""
        ...
