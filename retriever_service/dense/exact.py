"""Vectors as they are, memory-mapped: what a compressed index found is scored again by them.

`exact.vectors` holds them row by row without a header, in float16 (half the disk, scores to the fourth digit)
or float32.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from retriever_service.errors import IndexInvalid

FILE = "exact.vectors"
DTYPES = ("float16", "float32")


def flat_vectors(path: Path, header: bytes, dimension: int, vectors: int) -> np.ndarray:
    """The vectors of a flat FAISS file, float32 [vectors, dimension], mapped. Raises IndexInvalid for a file
    of another size."""
    size = path.stat().st_size
    if size != len(header) + 4 * dimension * vectors:
        raise IndexInvalid(f"{path}: {size} bytes are not {vectors} vectors of {dimension} numbers")
    return np.memmap(path, np.float32, "r", len(header), (vectors, dimension))


class ExactVectors:
    """The vectors of an index, mapped. For one thread at a time."""

    def __init__(self, path: Path, dtype: str, dimension: int, vectors: int) -> None:
        size = path.stat().st_size if path.is_file() else 0
        if size != np.dtype(dtype).itemsize * dimension * vectors:
            raise IndexInvalid(
                f"{path}: {size} bytes are not {vectors} vectors of {dimension} numbers in {dtype}; build "
                "the index again"
            )
        with path.open("rb") as file:
            self._pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.rows = np.frombuffer(self._pages, dtype).reshape(vectors, dimension)
        """All vectors [vectors, dimension], mapped."""

    def best(self, query: np.ndarray, rows: np.ndarray, topk: int) -> list[tuple[int, float]]:
        """(row, inner product) of the nearest of these rows, best first; equal scores by row. query: float32
        [dimension]; rows: int64, negative ones are none."""
        rows = np.sort(rows[rows >= 0])  # in the order of the disk
        self._ask_for(rows.tolist())
        scores = self.rows[rows].astype(np.float32) @ query
        order = np.lexsort((rows, -scores))[:topk]
        return list(zip(rows[order].tolist(), scores[order].tolist(), strict=True))

    def _ask_for(self, rows: list[int]) -> None:
        """Have the disk read all rows at the same time, and no more than these. Where they are in no memory,
        each would otherwise be waited for in turn, with 128 KiB around it."""
        width = self.rows.strides[0]
        for row in rows:
            begin = row * width
            page = begin - begin % mmap.PAGESIZE
            self._pages.madvise(mmap.MADV_WILLNEED, page, begin + width - page)


def write_exact(
    vectors: Callable[[int, int], np.ndarray],
    count: int,
    path: Path,
    dtype: str,
    block: int,
    progress: Callable[[int], None],
) -> None:
    """Write `vectors(begin, size)` for all rows, a block at a time. Killed, it goes on after the last whole
    block: a file that is cut off is never complete, as its size is checked where it is opened."""
    width = vectors(0, 1).shape[1] * np.dtype(dtype).itemsize
    path.touch()
    done = min(path.stat().st_size // (width * block) * block, count)
    os.truncate(path, done * width)
    with path.open("ab") as file:
        for begin in range(done, count, block):
            size = min(block, count - begin)
            file.write(vectors(begin, size).astype(dtype).tobytes())
            file.flush()
            os.fsync(file.fileno())
            progress(begin + size)
