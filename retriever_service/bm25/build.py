"""Turning scanned postings, passage by passage on disk, into a BM25 index in the format of bm25s, in bounded
memory."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numba import njit

from retriever_service.bm25.search import (
    DATA_FILE,
    FOLDER,
    INDICES_FILE,
    INDPTR_FILE,
    MAXIMA_FILE,
    PARAMETERS_FILE,
    VOCABULARY_FILE,
)

_BLOCK = 1 << 22
BUDGET_BYTES = 1 << 30
"""Memory for the part of the result that is put in order at a time."""


@njit(cache=True, nogil=True)
def _fill(terms, tfs, counts, first_row, low, high, base, cursor, norm, idf, out_rows, out_scores):
    """Scatter the postings of terms [low, high) of one block into column order. `norm` [N] is k1 * (1 - b + b
    * length / mean)."""
    at = 0
    for i in range(len(counts)):
        row = first_row + i
        for _ in range(counts[i]):
            term = terms[at]
            if low <= term < high:
                to = cursor[term] - base
                cursor[term] += 1
                tf = float(tfs[at])
                out_rows[to] = row
                out_scores[to] = np.float32(idf[term] * tf / (tf + norm[row]))
            at += 1


def write_bm25(
    scan: Path, out: Path, vocabulary: list[str], *, k1: float, b: float,
    progress: Callable[[int, int], None] | None = None,
) -> None:  # fmt: skip
    """Write `out/bm25/`. `scan` holds the raw arrays of the scan: `terms` uint32 and `tfs` uint16 (one for
    each passage and term), `counts` uint32 (terms of each passage) and `lengths` uint32 (tokens of each
    passage).

    The scan is read once for the document frequencies, then once for each BUDGET_BYTES of the result.
    """
    counts = np.fromfile(scan / "counts", np.uint32)
    lengths = np.fromfile(scan / "lengths", np.uint32)
    terms = _mapped(scan / "terms", np.uint32)
    tfs = _mapped(scan / "tfs", np.uint16)
    n_docs = len(counts)
    n_terms = len(vocabulary)
    frequency = _passages_with(terms, n_terms)
    indptr = np.concatenate([[0], np.cumsum(frequency)])
    idf = np.log(1 + (n_docs - frequency + 0.5) / (frequency + 0.5))
    norm = k1 * (1 - b + b * lengths / max(float(lengths.mean()), 1e-9))

    folder = out / FOLDER
    folder.mkdir(exist_ok=True)
    data_file = folder / DATA_FILE
    indices_file = folder / INDICES_FILE
    data = np.lib.format.open_memmap(data_file, "w+", np.float32, (len(terms),))
    indices = np.lib.format.open_memmap(indices_file, "w+", np.int32, (len(terms),))
    for file in (data_file, indices_file):
        _reserve(file)
    maxima = np.zeros(n_terms, np.float32)
    spans = _spans(indptr, BUDGET_BYTES // 8)
    cursor = indptr[:-1].copy()
    starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    # Passages that have about _BLOCK postings together.
    step = max(1, _BLOCK * n_docs // max(len(terms), 1))
    for number, (low, high) in enumerate(spans):
        base = int(indptr[low])
        end = int(indptr[high])
        rows_part = np.empty(end - base, np.int32)
        scores_part = np.empty(end - base, np.float32)
        for first in range(0, n_docs, step):
            last = min(first + step, n_docs)
            part = slice(int(starts[first]), int(starts[last]))
            _fill(
                np.asarray(terms[part]), np.asarray(tfs[part]), counts[first:last], first, low, high, base,
                cursor, norm, idf, rows_part, scores_part,
            )  # fmt: skip
            if progress:
                progress(number * n_docs + last, len(spans) * n_docs)
        indices[base:end] = rows_part
        data[base:end] = scores_part
        maxima[low:high] = np.maximum.reduceat(scores_part, indptr[low:high] - base)
    data.flush()
    indices.flush()
    _save(folder / MAXIMA_FILE, maxima)
    _save(folder / INDPTR_FILE, indptr)
    (folder / VOCABULARY_FILE).write_bytes(orjson.dumps({term: i for i, term in enumerate(vocabulary)}))
    (folder / PARAMETERS_FILE).write_bytes(orjson.dumps(_parameters(k1, b, n_docs)))


def _passages_with(terms: np.ndarray, n_terms: int) -> np.ndarray:
    """Passages that hold each term: int64 [n_terms]. terms: one entry for each passage and term."""
    found = np.zeros(n_terms, np.int64)
    for begin in range(0, len(terms), _BLOCK):
        found += np.bincount(terms[begin : begin + _BLOCK], minlength=n_terms)
    return found


def _parameters(k1: float, b: float, n_docs: int) -> dict[str, Any]:
    """With the keys that bm25s itself writes and reads: it can open the index too."""
    return {
        "k1": k1,
        "b": b,
        "delta": 0.5,
        "method": "lucene",
        "idf_method": "lucene",
        "dtype": "float32",
        "int_dtype": "int32",
        "num_docs": n_docs,
        "version": "0.3.16",
        "backend": "numpy",
    }


def _reserve(path: Path) -> None:
    """Take the disk that a mapped file needs: a full disk is an OSError here, and would kill the process
    (SIGBUS) at a write to the map."""
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def _save(path: Path, array: np.ndarray) -> None:
    """As `np.save`, whose OSError does not say that the disk is full."""
    content = io.BytesIO()
    np.save(content, array)
    path.write_bytes(content.getbuffer())


def _mapped(path: Path, dtype: type) -> np.ndarray:
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.zeros(0, dtype)


def _spans(indptr: np.ndarray, most: int) -> list[tuple[int, int]]:
    """Ranges of terms with at most `most` postings each (one term alone may have more)."""
    total = int(indptr[-1])
    n_terms = len(indptr) - 1
    if not total:
        return []
    spans = []
    low = 0
    for _ in range(math.ceil(total / max(most, 1)) + n_terms):
        high = max(low + 1, int(np.searchsorted(indptr, indptr[low] + most, "right")) - 1)
        spans.append((low, min(high, n_terms)))
        low = spans[-1][1]
        if low >= n_terms:
            break
    return spans
