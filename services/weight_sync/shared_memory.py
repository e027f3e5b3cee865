"""Weights through Ray's object store: shared memory on a node, moved by Ray to others. CPU and GPU; needs no process group.

The publisher packs tensors into buckets (safetensors bytes) and puts each into the store. A worker writes them to files in /dev/shm, which
its engine maps and loads. The store keeps a version for as long as anyone holds its WeightUpdate.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from services.contracts import WeightUpdate
from services.weight_sync.base import WeightMismatchError, WeightSyncError
from services.weight_sync.manifest import check_shapes, model_shapes

if TYPE_CHECKING:
    from torch import Tensor

BACKEND = "shared_memory"
_MEMORY = Path("/dev/shm")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Bucket:
    """Some of the weights: safetensors bytes in the object store."""

    ref: Any
    """ObjectRef of a uint8 array."""
    nbytes: int
    crc32: int
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    """Name, dtype and shape of each tensor."""


class SharedMemoryPublisher:
    """Packs weights into buckets of at most `bucket_mib` MiB (a larger tensor is a bucket of its own)."""

    def __init__(self, bucket_mib: int):
        self._limit = bucket_mib * 2**20

    def publish(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> WeightUpdate:
        buckets: list[Bucket] = []
        seen: set[str] = set()
        waiting: dict[str, Tensor] = {}
        size = 0
        for name, tensor in tensors:
            if name in seen:
                raise WeightSyncError(f"weights of version {version}: {name} was given twice")
            seen.add(name)
            nbytes = tensor.numel() * tensor.element_size()
            if waiting and size + nbytes > self._limit:
                buckets.append(_pack(waiting))
                waiting, size = {}, 0
            # The source may free or overwrite what it yielded, so it is copied here.
            waiting[name] = tensor.detach().to("cpu", copy=True).contiguous()
            size += nbytes
        if waiting:
            buckets.append(_pack(waiting))
        if not buckets:
            raise WeightSyncError(f"weights of version {version}: there are none")
        return WeightUpdate(version, BACKEND, tuple(buckets), sum(b.nbytes for b in buckets))


def _pack(tensors: dict[str, Tensor]) -> Bucket:
    import numpy as np
    import ray
    from safetensors.torch import save

    blob = save(tensors)
    described = tuple((name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items())
    return Bucket(ray.put(np.frombuffer(blob, np.uint8)), len(blob), zlib.crc32(blob), described)


class SharedMemoryReceiver:
    """Fetches buckets and lays them out as files for the engine."""

    def __init__(self, model_path: str, timeout_seconds: float):
        self._model_path, self._timeout_seconds = model_path, timeout_seconds
        self._shapes: tuple[dict[str, tuple[int, ...]], set[str]] | None = None
        remove_orphans()

    def receive(self, update: WeightUpdate) -> Path:
        if update.backend != BACKEND:
            raise WeightMismatchError(
                f"weights of version {update.version} came by {update.backend}; this worker takes {BACKEND}"
            )
        if self._shapes is None:
            self._shapes = model_shapes(self._model_path)
        sent = {name: shape for bucket in update.payload for name, _, shape in bucket.tensors}
        check_shapes(sent, *self._shapes, update.version)
        folder = Path(tempfile.mkdtemp(prefix=f"{_prefix()}{os.getpid()}-", dir=_place(update.nbytes)))
        try:
            deadline = time.monotonic() + self._timeout_seconds
            for i, bucket in enumerate(update.payload):
                _write(bucket, folder / f"bucket_{i:04d}.safetensors", update.version, deadline)
        except BaseException:
            self.release(folder)
            raise
        return folder

    def release(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=False)


def _prefix() -> str:
    """What weight folders begin with. Containers may share /dev/shm: a process id means something in its own namespace only."""
    namespace = Path("/proc/self/ns/pid")
    return f"unspiral-weights-{namespace.stat().st_ino if namespace.exists() else 0}-"


def remove_orphans() -> None:
    """Remove weight folders of processes that are gone: a worker killed between receive and release leaves a whole copy."""
    prefix = _prefix()
    for folder in (f for place in {_MEMORY, Path(tempfile.gettempdir())} for f in place.glob(f"{prefix}*-*")):
        owner = folder.name.removeprefix(prefix).split("-")[0]
        if owner.isdecimal() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)


def _place(nbytes: int) -> Path:
    """Memory where it has room for the weights, else the temporary folder."""
    if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > 1.1 * nbytes:
        return _MEMORY
    _log.warning("%s has no room for %.2f GB of weights; they go through %s", _MEMORY, nbytes / 1e9, tempfile.gettempdir())
    return Path(tempfile.gettempdir())


def _write(bucket: Bucket, path: Path, version: int, deadline: float) -> None:
    import ray
    from safetensors import SafetensorError, safe_open

    try:
        # Not ray.get, which warns inside an asynchronous actor, in whatever thread it is called.
        blob = bucket.ref.future().result(timeout=max(0.1, deadline - time.monotonic()))
    except TimeoutError as e:
        raise WeightSyncError(f"weights of version {version}: {path.stem} did not arrive in time") from e
    except ray.exceptions.RayError as e:
        raise WeightSyncError(
            f"weights of version {version}: {path.stem} is lost ({type(e).__name__}): its learner has gone"
        ) from e
    if len(blob) != bucket.nbytes or zlib.crc32(blob) != bucket.crc32:
        raise WeightSyncError(
            f"weights of version {version}: {path.stem} arrived damaged (checksum of {bucket.tensors[0][0]} ...)"
        )
    path.write_bytes(memoryview(blob))
    try:
        with safe_open(path, "pt") as f:
            held = {name: tuple(f.get_slice(name).get_shape()) for name in f.keys()}  # noqa: SIM118 - not a mapping
    except SafetensorError as e:
        raise WeightSyncError(f"weights of version {version}: {path.stem} is not a safetensors file ({e})") from e
    for name, dtype, shape in bucket.tensors:
        if held.get(name) != tuple(shape):
            raise WeightMismatchError(
                f"weights of version {version}: {name} ({dtype}) was announced as {list(shape)}, sent as {held.get(name)}"
            )
