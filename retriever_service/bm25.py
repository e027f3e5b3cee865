"""BM25 over an index in the format of bm25s, memory-mapped, searched by a compiled kernel of our own.

Scores are Lucene's: `idf * tf / (tf + k1 * (1 - b + b * length / mean length))`, `idf = ln(1 + (N - df + .5) / (df + .5))`
(Robertson and Zaragoza 2009; Kamphuis et al. 2020, "Which BM25 do you mean?"), computed once at the build (Lù 2024, bm25s).
Equal scores are ordered by row. Documents that match no term are never returned.
"""

from __future__ import annotations

from pathlib import Path

import bm25s
import numpy as np
from numba import njit

from .analysis import Analyzer, AnalyzerSettings
from .errors import IndexInvalid

FOLDER = "bm25"


@njit(cache=True, nogil=True)
def _rank(data, indices, indptr, terms, starts, topk, accumulator, rows, scores, counts):
    """Top `topk` rows of each query. Query q has the terms `terms[starts[q]:starts[q + 1]]`; `accumulator` [N] is all zero before and after."""
    n_docs = len(accumulator)
    for q in range(len(starts) - 1):
        postings = 0
        for t in range(starts[q], starts[q + 1]):
            begin, end = indptr[terms[t]], indptr[terms[t] + 1]
            postings += end - begin
            for p in range(begin, end):
                accumulator[indices[p]] += data[p]
        best, best_rows, size = scores[q], rows[q], 0
        if postings * 2 < n_docs:
            for t in range(starts[q], starts[q + 1]):
                for p in range(indptr[terms[t]], indptr[terms[t] + 1]):
                    row = indices[p]
                    size = _offer(best, best_rows, size, topk, row, accumulator[row])
                    accumulator[row] = 0
        else:
            for row in range(n_docs):
                size = _offer(best, best_rows, size, topk, row, accumulator[row])
                accumulator[row] = 0
        counts[q] = size


@njit(cache=True, nogil=True, inline="always")
def _offer(best, best_rows, size, topk, row, score):
    """Insert into the descending list `best[:size]` if the score is above 0 and among the best; equal scores go by row."""
    if score <= 0 or (size == topk and (score < best[size - 1] or (score == best[size - 1] and row > best_rows[size - 1]))):
        return size
    at = size if size < topk else topk - 1
    while at > 0 and (best[at - 1] < score or (best[at - 1] == score and best_rows[at - 1] > row)):
        best[at], best_rows[at] = best[at - 1], best_rows[at - 1]
        at -= 1
    best[at], best_rows[at] = score, row
    return min(size + 1, topk)


class BM25Ranker:
    """Ranks rows of an index folder. One thread at a time: it owns a scratch array of one float for each passage."""

    def __init__(self, folder: Path, analyzer: AnalyzerSettings) -> None:
        try:
            index = bm25s.BM25.load(folder / FOLDER, mmap=True, auto_compile=False)
        except (OSError, ValueError, KeyError) as error:
            raise IndexInvalid(f"{folder / FOLDER}: not a readable BM25 index ({error}); build it again") from None
        self._analyzer = Analyzer(analyzer)
        self._vocabulary = index.vocab_dict
        # Plain arrays over the same pages: the kernel would compile once more for numpy's memmap class.
        self._data, self._indices, self._indptr = (np.asarray(index.scores[key]) for key in ("data", "indices", "indptr"))
        self._accumulator = np.zeros(index.scores["num_docs"], np.float32)

    def rank(self, queries: list[str], topk: int) -> list[list[tuple[int, float]]]:
        """(row, score) of the best passages of each query, best first; fewer than `topk` where fewer match."""
        topk = min(topk, len(self._accumulator))
        vocabulary, terms, starts = self._vocabulary, [], [0]
        for query in queries:
            terms += [vocabulary[t] for t in self._analyzer.terms(query) if t in vocabulary]
            starts.append(len(terms))
        rows = np.empty((len(queries), topk), np.int32)
        scores = np.empty((len(queries), topk), np.float32)
        counts = np.empty(len(queries), np.int64)
        _rank(
            self._data, self._indices, self._indptr, np.array(terms, np.int64), np.array(starts, np.int64),
            topk, self._accumulator, rows, scores, counts,
        )  # fmt: skip
        return [
            list(zip(r[:n], s[:n], strict=True))
            for r, s, n in zip(rows.tolist(), scores.tolist(), counts.tolist(), strict=True)
        ]

    def normalise(self, query: str) -> str:
        """Queries of the same form get the same answer."""
        return " ".join(query.lower().split())
