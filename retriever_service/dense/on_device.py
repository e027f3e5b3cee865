"""Brute-force search by PyTorch in a server: on which devices, with which numbers, and over which vectors.

The rows are cut into as many parts as there are devices. Each device searches its own part at the same time
as the others, and the best of all parts are kept.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import psutil

from retriever_service.dense.gpus import gpu_count
from retriever_service.dense.torch_exact import DTYPES, TorchExact
from services.common.errors import EnvironmentLacks, UserError
from services.common.loading.extras import needed_for
from services.common.names import accepted

DEVICES = ("cpu", "cuda")
_SPARE_BYTES = 4 << 30
"""Of a GPU's memory: for the products of a batch, for the block that is being made, and for the encoder."""
_SHARE = 0.9
"""Of the free memory that vectors may take."""


@dataclass(frozen=True)
class OnDevice:
    """A choice of the user: `device` of DEVICES, and `dtype` of torch_exact.DTYPES."""

    device: str
    dtype: str

    @classmethod
    def of(cls, device: str | None, dtype: str | None) -> OnDevice | None:
        """The choice of two flags; None where there is no device. Raises UserError, and EnvironmentLacks
        without torch or without a GPU that it sees."""
        if device is None:
            if dtype is not None:
                raise UserError(f"--dense-dtype {dtype}: goes with --dense-device cpu or cuda alone")
            return None
        if device not in DEVICES:
            raise UserError(f"--dense-device {device}: {accepted(device, DEVICES)}")
        if dtype is not None and dtype not in DTYPES:
            raise UserError(f"--dense-dtype {dtype}: {accepted(dtype, DTYPES)}")
        devices_of(device)
        return cls(device, dtype or ("float16" if device == "cuda" else "float32"))


def devices_of(device: str) -> list[str]:
    """The devices of torch: all GPUs for `cuda`. Raises EnvironmentLacks."""
    with needed_for("--dense-device", "dense"):
        count = gpu_count()
    if device == "cpu":
        return ["cpu"]
    if not count:
        raise EnvironmentLacks(
            "--dense-device cuda: torch sees no GPU here; give --dense-device cpu, or leave it out for FAISS"
        )
    return [f"cuda:{number}" for number in range(count)]


def free_bytes(device: str) -> int:
    """Memory of a device that vectors may take."""
    if device == "cpu":
        return int(_SHARE * psutil.virtual_memory().available)
    import torch

    free, _ = torch.cuda.mem_get_info(torch.device(device))
    return max(0, int(_SHARE * (free - _SPARE_BYTES)))


class DeviceSearch:
    """Nearest vectors by inner product over several devices. For one thread at a time.

    vectors: float32 or float16 [n, d], an array or a mapped file.
    """

    def __init__(self, vectors: np.ndarray, devices: list[str], dtype: str) -> None:
        bounds = np.linspace(0, len(vectors), len(devices) + 1).astype(int).tolist()
        self._parts = [
            (
                begin,
                TorchExact(vectors[begin:end], device=device, dtype=dtype, device_bytes=free_bytes(device)),
            )
            for begin, end, device in zip(bounds, bounds[1:], devices, strict=False)
            if end > begin
        ]
        self._pool = ThreadPoolExecutor(len(devices), "dense-search")
        where = ", ".join(devices)
        streamed = "" if all(part.resident for _, part in self._parts) else ", streamed from the disk"
        self.how = f"PyTorch {dtype} on {where}{streamed}"
        """How it searches, in a few words."""

    def search(self, queries: np.ndarray, topk: int) -> tuple[np.ndarray, np.ndarray]:
        """(scores float32, rows int64), each [queries, topk], best first, equal scores by row; fewer where
        there are fewer rows. queries: float32 [n, d]."""
        if len(self._parts) == 1:
            return self._parts[0][1].search(queries, topk)
        found = list(self._pool.map(lambda part: part[1].search(queries, topk), self._parts))
        scores = np.concatenate([one for one, _ in found], 1)
        rows = np.concatenate(
            [begin + one for (begin, _), (_, one) in zip(self._parts, found, strict=True)], 1
        )
        order = np.lexsort((rows, -scores), axis=1)[:, :topk]
        return np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)
