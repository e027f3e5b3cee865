"""BM25 over an index in the format of bm25s, memory-mapped, searched by a compiled kernel of our own.

Scores are Lucene's: `idf * tf / (tf + k1 * (1 - b + b * length / mean length))`, `idf = ln(1 + (N - df + .5)
/ (df + .5))` (Robertson and Zaragoza 2009; Kamphuis et al. 2020, "Which BM25 do you mean?"), computed once at
the build (Lù 2024, bm25s). Equal scores are ordered by row. Documents that match no term are never returned.
"""

from __future__ import annotations

import os
from pathlib import Path

# bm25s starts JAX where that is installed, and JAX would take three quarters of a GPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import bm25s
import numpy as np

from retriever_service.bm25.analysis import Analyzer, AnalyzerSettings, TermIds
from retriever_service.bm25.kernel import RANGE_ROWS, rank
from retriever_service.errors import IndexInvalid

FOLDER, MAXIMA_FILE = "bm25", "maxima.npy"


class BM25Ranker:
    """Ranks rows of an index folder. For one thread at a time: the stemmer keeps state."""

    quick = True

    def __init__(self, folder: Path, analyzer: AnalyzerSettings) -> None:
        try:
            index = bm25s.BM25.load(folder / FOLDER, mmap=True, auto_compile=False)
            self._maxima = np.load(folder / FOLDER / MAXIMA_FILE)
        except (OSError, ValueError, KeyError) as error:
            raise IndexInvalid(
                f"{folder / FOLDER}: not a readable BM25 index ({error}); build it again"
            ) from None
        self._analyzer = Analyzer(analyzer)
        self._term_ids = TermIds(self._analyzer, index.vocab_dict.get)
        # Plain arrays over the same pages: the kernel would compile once more for numpy's memmap class.
        self._data, self._indices, self._indptr = (
            np.asarray(index.scores[key]) for key in ("data", "indices", "indptr")
        )
        self._sums = np.zeros(RANGE_ROWS, np.float32)
        self._passages = int(index.scores["num_docs"])

    def rank(self, queries: list[str], topk: int) -> list[list[tuple[int, float]]]:
        """(row, score) of the best passages of each query, best first; fewer than `topk` where fewer
        match."""
        topk = min(topk, self._passages)
        terms, starts, size = [], [0], len(queries)
        for query in queries:
            terms += self._term_ids(query)
            starts.append(len(terms))
        rows, scores = np.empty((size, topk), np.int32), np.empty((size, topk), np.float32)
        counts = np.empty(size, np.int64)
        rank(
            self._data, self._indices, self._indptr, self._maxima, self._passages, np.array(terms, np.int64),
            np.array(starts, np.int64), rows, scores, counts, self._sums,
        )  # fmt: skip
        return [list(zip(r, s))[:n] for r, s, n in zip(rows.tolist(), scores.tolist(), counts.tolist())]  # noqa: B905

    def normalise(self, query: str) -> str:
        """Queries of the same form get the same answer."""
        return " ".join(self._analyzer.lower(query).split())
