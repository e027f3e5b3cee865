"""Exact search by plain PyTorch, on a GPU or a CPU: vectors on the device in blocks, or streamed through it.

Each block is one matrix product and one top k, and the best of all blocks are kept. A product of float16 is
rounded to float16, and int8 (a scale per vector) rounds the vectors too, so these find candidates, `rescore`
for each passage asked for, which are scored again in float32: those of float16 by the rows on the device,
those of int8 by the vectors as they are. The result is exact where the candidates hold it.
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
RESCORE = {"float32": 1, "float16": 4, "int8": 10}
GATHERED_BYTES = 1 << 28
"""Most bytes of rows that are gathered at once to be scored again, but for those of one query."""
GROUP = 128
"""Scores of which one maximum is taken first (`top_by_groups`)."""


def top_by_groups(torch: Any, scores: Any, k: int) -> tuple[Any, Any]:
    """As `scores.topk(min(k, columns), dim=1)` of scores [rows, columns], but which of equal ones is taken is
    left open.

    The k largest lie in the k groups with the largest maxima, so that all scores are read once, and only k
    groups are sorted; PyTorch's topk reads long rows several times."""
    columns = scores.shape[1]
    whole = columns // GROUP * GROUP
    if columns < 4 * k * GROUP:
        return tuple(scores.topk(min(k, columns), dim=1))
    best = scores[:, :whole].unflatten(1, (-1, GROUP)).amax(2).topk(k, dim=1).indices
    within = torch.arange(GROUP, device=scores.device)
    rest = torch.arange(whole, columns, device=scores.device).expand(len(scores), -1)
    places = torch.cat([(best[:, :, None] * GROUP + within).flatten(1), rest], 1)
    found, at = scores.gather(1, places).topk(k, dim=1)
    return found, places.gather(1, at)


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
        rescore: int | None = None,
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
        self._rescore = rescore if rescore is not None else RESCORE[dtype]
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
            scores, at = top_by_groups(torch, self._products(asked, block), depth)
            if self._dtype == "float16":
                scores = self._scored_by_rows(asked, block, at)
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
        """Inner products [queries, rows of the block], rounded to float16 on a GPU but for float32."""
        half = self._dtype != "float32" and self._device.type != "cpu"
        kind = self._torch.float16 if half else self._torch.float32
        found = asked.to(kind) @ block.vectors.to(kind).T
        return found if block.scales is None else found.mul_(block.scales.to(kind))

    def _scored_by_rows(self, asked: Any, block: _Block, at: Any) -> Any:
        """Inner products [queries, k] in float32 of the block's rows `at`. The rows are gathered for a few
        queries at a time: for all of them they take gigabytes."""
        each = at.shape[1] * block.vectors.shape[1] * (block.vectors.element_size() + 4)
        step = max(1, GATHERED_BYTES // max(each, 1))
        parts = zip(asked.split(step), at.split(step), strict=True)
        einsum = self._torch.einsum
        return self._torch.cat([einsum("qd,qkd->qk", a, block.vectors[i].float()) for a, i in parts])

    def _scored_again(self, queries: np.ndarray, rows: np.ndarray) -> np.ndarray:
        found = np.empty(rows.shape, np.float32)
        for i, own in enumerate(rows):
            order = np.argsort(own)  # in the order of the disk
            found[i, order] = self._vectors[own[order]].astype(np.float32) @ queries[i]
        return found
