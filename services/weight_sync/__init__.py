"""Weight sync: `make_publisher` for the learner, `make_receiver` for a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.weight_sync.base import Publisher, Receiver, WeightMismatchError, WeightSyncError

if TYPE_CHECKING:
    from services.settings import WeightSyncSettings

__all__ = ["Publisher", "Receiver", "WeightMismatchError", "WeightSyncError", "make_publisher", "make_receiver"]


def make_publisher(settings: WeightSyncSettings) -> Publisher:
    """The learner's side of `weight_sync.backend`."""
    from services.weight_sync.shared_memory import SharedMemoryPublisher

    return SharedMemoryPublisher(settings.bucket_mib)


def make_receiver(settings: WeightSyncSettings, model_path: str) -> Receiver:
    """A worker's side; `model_path` is the folder that says which weights the model has."""
    from services.weight_sync.shared_memory import SharedMemoryReceiver

    return SharedMemoryReceiver(model_path, settings.timeout_seconds)
