"""Weights through Ray's object store: shared memory on a node, moved by Ray to others. CPU and GPU; needs no
process group.

The publisher packs tensors into buckets, each a safetensors file in memory, and puts each into the store
while the next one fills. A worker writes them to files in /dev/shm, several at a time, which its engine maps
and loads. The store keeps a version for as long as anyone holds its WeightUpdate.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from services.contracts import WeightUpdate
from services.weight_sync.base import WeightsGoneError, WeightSyncError
from services.weight_sync.manifest import model_shapes, shape_problem

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

BACKEND = "shared_memory"
_MEMORY = Path("/dev/shm")
_HEADER_BYTES = 2**20
"""Room for a bucket's safetensors header, which can be written only once the bucket is full."""
_TYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_WRITERS = 4
"""Buckets that a worker writes at a time."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Bucket:
    """Some of the weights: safetensors bytes in the object store."""

    ref: Any
    """ObjectRef of a uint8 array."""
    nbytes: int
    checksum: int
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    """Name, dtype and shape of each tensor."""


class SharedMemoryPublisher:
    """Packs weights into buckets of at most `bucket_mib` MiB (a larger tensor is a bucket of its own)."""

    def __init__(self, bucket_mib: int):
        self._limit = bucket_mib * 2**20

    def publish(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> WeightUpdate:
        seen: set[str] = set()
        filling = _Packer(self._limit)
        resting = _Packer(self._limit)
        stored: list[Future[Bucket]] = []
        # One bucket fills while the other is checked and copied into the store. The source may free or
        # overwrite what it yielded, so nothing of it is kept.
        with ThreadPoolExecutor(1, "weights-to-store") as store:

            def send() -> None:
                nonlocal filling, resting
                if stored:  # it is in `resting`, which is filled next
                    stored[-1].result()
                stored.append(store.submit(filling.store))
                filling, resting = resting, filling
                filling.clear()

            for name, tensor in tensors:
                if name in seen:
                    raise WeightSyncError(f"weights of version {version}: {name} was given twice")
                seen.add(name)
                if not filling.has_room(name, tensor):
                    send()
                filling.add(name, tensor)
            if not seen:
                raise WeightSyncError(f"weights of version {version}: there are none")
            send()
            buckets = tuple(future.result() for future in stored)
        return WeightUpdate(version, BACKEND, buckets, sum(b.nbytes for b in buckets))


class _Packer:
    """One bucket in the making: |room|header|weights end to end|, so that header and weights go into the
    store as they lie.

    The safetensors library's own `save` makes two copies of all weights.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer: Tensor | None = None
        self.clear()

    def clear(self) -> None:
        self._size = 0
        self._names = 0
        self._tensors: list[tuple[str, str, tuple[int, ...]]] = []
        self._sizes: list[int] = []
        self._on_gpu: torch.device | None = None

    def has_room(self, name: str, tensor: Tensor) -> bool:
        """True where a tensor fits into this bucket; an empty bucket takes any."""
        names = self._names + _entry_bytes(name, tensor.dim())
        return not self._tensors or (self._size + tensor.nbytes <= self._limit and names <= _HEADER_BYTES)

    def add(self, name: str, tensor: Tensor) -> None:
        import torch

        dtype = str(tensor.dtype).removeprefix("torch.")
        nbytes = tensor.nbytes
        if dtype not in _TYPES:
            raise WeightSyncError(f"{name} is of type {dtype}: weights may be {', '.join(_TYPES)}")
        start = _HEADER_BYTES + self._size
        end = start + nbytes
        if self._buffer is None or len(self._buffer) < end:
            # Pinned memory, which a GPU writes to at full speed, is costly to get: it is kept from bucket to
            # bucket, and small for a small model.
            size = max(end, _HEADER_BYTES + min(self._limit, 2 * (end - _HEADER_BYTES)))
            longer = torch.empty(size, dtype=torch.uint8, pin_memory=tensor.is_cuda)
            if self._buffer is not None:
                self._synchronize()
                longer[_HEADER_BYTES:start].copy_(self._buffer[_HEADER_BYTES:start])
            self._buffer = longer
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        self._buffer[start:end].copy_(flat, non_blocking=True)
        self._on_gpu = tensor.device if tensor.is_cuda else self._on_gpu
        self._tensors.append((name, dtype, tuple(tensor.shape)))
        self._sizes.append(nbytes)
        self._size += nbytes
        self._names += _entry_bytes(name, tensor.dim())

    def _synchronize(self) -> None:
        if self._on_gpu is not None:
            import torch

            torch.cuda.synchronize(self._on_gpu)

    def store(self) -> Bucket:
        import ray

        self._synchronize()
        assert self._buffer is not None  # `add` made it
        header = {}
        offset = 0
        for (name, dtype, shape), nbytes in zip(self._tensors, self._sizes, strict=True):
            header[name] = {"dtype": _TYPES[dtype], "shape": shape, "data_offsets": (offset, offset + nbytes)}
            offset += nbytes
        text = json.dumps(header).encode()
        # The format's rule: the weights begin at a multiple of 8 bytes.
        text += b" " * (-len(text) % 8)
        begin = _HEADER_BYTES - 8 - len(text)
        whole = self._buffer.numpy()
        whole[begin:_HEADER_BYTES] = bytearray(len(text).to_bytes(8, "little") + text)
        blob = whole[begin : _HEADER_BYTES + self._size]
        return Bucket(ray.put(blob), len(blob), checksum(blob), tuple(self._tensors))


def _entry_bytes(name: str, dimensions: int) -> int:
    """No less than what a tensor takes in the header."""
    return len(json.dumps(name)) + 24 * dimensions + 128


def checksum(blob: np.ndarray) -> int:
    """Of a uint8 array: CRC-32 over the sums of its 4 KiB blocks (of little-endian words, modulo 2^64) and
    what is left after the last one.

    As fast as memory, which CRC-32 over all of it is not.
    """
    import numpy as np

    words = blob[: len(blob) // 4096 * 4096].view("<u8").reshape(-1, 512)
    return zlib.crc32(
        bytes(blob[words.nbytes :]), zlib.crc32(words.sum(axis=1, dtype=np.uint64).astype("<u8").tobytes())
    )


class SharedMemoryReceiver:
    """Fetches buckets and lays them out as files for the engine."""

    def __init__(self, model_path: str, timeout_seconds: float):
        self._model_path = model_path
        self._timeout_seconds = timeout_seconds
        self._shapes: tuple[dict[str, tuple[int, ...]], set[str]] | None = None
        remove_orphans()

    def receive(self, update: WeightUpdate) -> Path:
        if update.backend != BACKEND:
            raise WeightSyncError(
                f"weights of version {update.version} came by {update.backend}; this worker takes {BACKEND}"
            )
        if self._shapes is None:
            self._shapes = model_shapes(self._model_path)
        sent = {name: shape for bucket in update.payload for name, _, shape in bucket.tensors}
        if problem := shape_problem(sent, *self._shapes, update.version):
            raise WeightSyncError(problem)
        deadline = time.monotonic() + self._timeout_seconds
        place = _place(update.nbytes)
        try:
            return self._fetch(update, place, deadline)
        except OSError as e:
            if e.errno != errno.ENOSPC or place != _MEMORY:
                raise
            # Another worker of this host has taken the room meanwhile.
            _say_full(update.nbytes)
            return self._fetch(update, Path(tempfile.gettempdir()), deadline)

    def _fetch(self, update: WeightUpdate, place: Path, deadline: float) -> Path:
        folder = Path(tempfile.mkdtemp(prefix=f"{_prefix()}{os.getpid()}-", dir=place))
        with contextlib.ExitStack() as undo:
            undo.callback(self.release, folder)
            with ThreadPoolExecutor(_WRITERS, "weights-from-store") as pool:
                written = [
                    pool.submit(
                        _write, bucket, folder / f"bucket_{i:04d}.safetensors", update.version, deadline
                    )
                    for i, bucket in enumerate(update.payload)
                ]
                for future in written:
                    future.result()
            undo.pop_all()
        return folder

    def release(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=False)


def _prefix() -> str:
    """Beginning of the names of weight folders. Containers may share /dev/shm, and a process id is valid in
    its own namespace alone."""
    namespace = Path("/proc/self/ns/pid")
    return f"unspiral-weights-{namespace.stat().st_ino if namespace.exists() else 0}-"


def remove_orphans() -> None:
    """Remove weight folders of processes that are gone: a worker killed between receive and release leaves a
    whole copy."""
    for folder in orphans():
        shutil.rmtree(folder, ignore_errors=True)


def orphans() -> list[Path]:
    """Weight folders of this user whose processes are gone."""
    prefix = _prefix()
    found = []
    for folder in (f for place in {_MEMORY, Path(tempfile.gettempdir())} for f in place.glob(f"{prefix}*-*")):
        owner = folder.name.removeprefix(prefix).split("-")[0]
        with contextlib.suppress(FileNotFoundError):  # another receiver was quicker
            if (
                owner.isdecimal()
                and not psutil.pid_exists(int(owner))
                and folder.lstat().st_uid == os.getuid()
            ):
                found.append(folder)
    return found


def _place(nbytes: int) -> Path:
    """/dev/shm where it has room for the weights; otherwise the temporary folder."""
    # A tenth more than the weights: headers, and what another worker begins to write at the same time.
    if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > 1.1 * nbytes:
        return _MEMORY
    _say_full(nbytes)
    return Path(tempfile.gettempdir())


def _say_full(nbytes: int) -> None:
    _log.warning(
        "%s has no room for %.2f GB of weights; they go through %s",
        _MEMORY,
        nbytes / 1e9,
        tempfile.gettempdir(),
    )


def _write(bucket: Bucket, path: Path, version: int, deadline: float) -> None:
    import ray
    from safetensors import SafetensorError, safe_open

    try:
        # Not ray.get, which warns inside an asynchronous actor, in whatever thread it is called.
        blob = bucket.ref.future().result(timeout=max(0.1, deadline - time.monotonic()))
    except TimeoutError as e:
        raise WeightSyncError(f"weights of version {version}: {path.stem} did not arrive in time") from e
    except ray.exceptions.RayError as e:
        raise WeightsGoneError(
            f"weights of version {version}: {path.stem} is lost ({type(e).__name__}): its learner has gone"
        ) from e
    if len(blob) != bucket.nbytes or checksum(blob) != bucket.checksum:
        raise WeightSyncError(
            f"weights of version {version}: {path.stem} arrived damaged "
            f"(checksum of {bucket.tensors[0][0]} ...)"
        )
    path.write_bytes(memoryview(blob))
    try:
        with safe_open(path, "pt") as f:
            names = f.keys()  # of a file, which is no mapping
            held = {name: tuple(f.get_slice(name).get_shape()) for name in names}
    except SafetensorError as e:
        raise WeightSyncError(
            f"weights of version {version}: {path.stem} is not a safetensors file ({e})"
        ) from e
    for name, dtype, shape in bucket.tensors:
        if held.get(name) != tuple(shape):
            raise WeightSyncError(
                f"weights of version {version}: {name} ({dtype}) was announced as {list(shape)}, "
                f"sent as {held.get(name)}"
            )
