"""Weight sync: `make_source` or `make_publisher` for the learner; for a worker `make_receiver`, or the engine
itself takes part in a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from services.weight_sync.base import (
    GroupBrokenError,
    GroupMismatchError,
    HalfWrittenError,
    Publisher,
    Receiver,
    Source,
    WeightsGoneError,
    WeightSyncError,
    untouched,
)
from services.weight_sync.broadcast import BroadcastSource
from services.weight_sync.shared_memory import SharedMemoryPublisher, SharedMemoryReceiver

if TYPE_CHECKING:
    from services.contracts import WeightsReceiver
    from services.settings import WeightSyncSettings

__all__ = [
    "GroupBrokenError",
    "GroupMismatchError",
    "HalfWrittenError",
    "Publisher",
    "Receiver",
    "Source",
    "WeightSyncError",
    "WeightsGoneError",
    "choose_backend",
    "make_publisher",
    "make_receiver",
    "make_source",
    "untouched",
]


def choose_backend(
    settings: WeightSyncSettings, *, learner_gpu: bool, receivers: Sequence[WeightsReceiver]
) -> str:
    """`weight_sync.backend`, with `auto` decided: nccl where learner and every worker have GPUs of their own;
    otherwise shared_memory."""
    if settings.backend != "auto":
        return settings.backend
    own = learner_gpu and bool(receivers) and all(r.gpus >= r.ranks for r in receivers)
    return "nccl" if own else "shared_memory"


def make_publisher(settings: WeightSyncSettings) -> Publisher:
    """The learner's side of shared_memory."""
    return SharedMemoryPublisher(settings.bucket_mib)


def make_source(settings: WeightSyncSettings, backend: str, device: Any, dtype: str) -> Source:
    """The learner's side of nccl and gloo. dtype: of the engines, such as `bfloat16`; weights are cast to it
    before they are sent."""
    return BroadcastSource(settings, backend, device, dtype)


def make_receiver(settings: WeightSyncSettings, model_path: str) -> Receiver:
    """A worker's side of shared_memory; `model_path` is the folder that says which weights the model has."""
    return SharedMemoryReceiver(model_path, settings.timeout_seconds)
