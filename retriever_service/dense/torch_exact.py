"""Exact search by plain PyTorch, on a GPU or a CPU: vectors on the device in blocks, or streamed through it.

Each block is one matrix product and one top k, and the best of all blocks are kept. In float16 the products
are of rounded vectors. In int8 (a scale per vector) candidates are found, `rescore` for each passage asked
for, and scored again by the vectors as they are, so that the result is exact where the candidates hold it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.common.errors import UserError
from services.common.loading.extras import needed_for
from services.common.names import accepted

DTYPES = ("float32", "float16", "int8")
BLOCK_ROWS = 1 << 19
RESCORE = 10


@dataclass
class _Block:
    """Vectors of the rows from `begin` on, and the scale of each where they are int8."""

    begin: int
    vectors: Any
    scales: Any


class TorchExact:
    """Nearest vectors by inner product. For one thread at a time.

    `vectors` is float32 or float16 [n, d], an array or a mapped file. Where the blocks fit into
    `device_bytes` they stay on the device; otherwise each search streams them through it.
    """

    def __init__(
        self,
        vectors: np.ndarray,
        *,
        device: str = "cpu",
        dtype: str = "float16",
        block_rows: int = BLOCK_ROWS,
        rescore: int = RESCORE,
        device_bytes: int | None = None,
    ) -> None:
        with needed_for("search by PyTorch", "dense"):
            import torch
        if dtype not in DTYPES:
            raise UserError(f"dtype {dtype!r}: {accepted(dtype, DTYPES)}")
        self._torch = torch
        self._vectors = vectors
        self._device = torch.device(device)
        self._dtype = dtype
        self._block_rows = block_rows
        self._rescore = rescore if dtype == "int8" else 1
        width = {"float32": 4, "float16": 2, "int8": 1}[dtype]
        needed = len(vectors) * (width * vectors.shape[1] + (4 if dtype == "int8" else 0))
        self.resident = device_bytes is None or needed <= device_bytes
        """Whether all blocks stay on the device."""
        self._blocks = [*self._made()] if self.resident else []

    def search(self, queries: np.ndarray, topk: int) -> tuple[np.ndarray, np.ndarray]:
        """(scores float32, rows int64), each [queries, topk], best first, equal scores by row. queries:
        float32 [n, d]."""
        torch = self._torch
        topk = min(topk, len(self._vectors))
        depth = min(topk * self._rescore, len(self._vectors))
        asked = torch.from_numpy(np.ascontiguousarray(queries, np.float32)).to(self._device)
        best = torch.full((len(queries), 0), 0.0, device=self._device)
        rows = torch.zeros((len(queries), 0), dtype=torch.int64, device=self._device)
        for block in self._blocks or self._made():
            found = self._products(asked, block)
            scores, at = found.topk(min(depth, found.shape[1]), dim=1)
            best = torch.cat([best, scores], 1)
            rows = torch.cat([rows, at + block.begin], 1)
            if best.shape[1] > depth:
                best, kept = best.topk(depth, dim=1)
                rows = rows.gather(1, kept)
        found_rows = rows.cpu().numpy()
        scores_found = best.cpu().numpy()
        if self._dtype == "int8":
            scores_found = self._scored_again(queries, found_rows)
        order = np.lexsort((found_rows, -scores_found), axis=1)[:, :topk]
        return np.take_along_axis(scores_found, order, 1), np.take_along_axis(found_rows, order, 1)

    def _made(self) -> Iterator[_Block]:
        torch = self._torch
        for begin in range(0, len(self._vectors), self._block_rows):
            part = torch.from_numpy(np.array(self._vectors[begin : begin + self._block_rows]))
            part = part.to(self._device)
            if self._dtype != "int8":
                yield _Block(begin, part.to(getattr(torch, self._dtype)), None)
                continue
            part = part.float()
            scales = part.abs().amax(1).clamp(min=1e-12) / 127
            yield _Block(begin, (part / scales[:, None]).round().to(torch.int8), scales)

    def _products(self, asked: Any, block: _Block) -> Any:
        """Inner products, float32 [queries, rows of the block]."""
        if self._dtype == "float32":
            return asked @ block.vectors.T
        kind = self._torch.float32 if self._device.type == "cpu" else self._torch.float16
        found = (asked.to(kind) @ block.vectors.to(kind).T).float()
        return found if block.scales is None else found * block.scales

    def _scored_again(self, queries: np.ndarray, rows: np.ndarray) -> np.ndarray:
        found = np.empty(rows.shape, np.float32)
        for i, own in enumerate(rows):
            order = np.argsort(own)  # in the order of the disk
            found[i, order] = self._vectors[own[order]].astype(np.float32) @ queries[i]
        return found
