"""BM25 over memory-mapped postings in the format of bm25s, searched by a compiled kernel.

Scores are Lucene's: `idf * tf / (tf + k1 * (1 - b + b * length / mean length))`, `idf = ln(1 + (N - df + .5)
/ (df + .5))` (Robertson and Zaragoza 2009; Kamphuis et al. 2020, "Which BM25 do you mean?"), computed once at
the build (Lù 2024, bm25s). Equal scores are ordered by row. Documents that match no term are never returned.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson

from retriever_service.bm25.analysis import Analyzer, AnalyzerSettings, TermIds
from retriever_service.bm25.kernel import RANGE_ROWS, rank
from retriever_service.errors import damaged

FOLDER = "bm25"
DATA_FILE = "data.csc.index.npy"
"""Score of each posting, float32, term by term..."""
INDICES_FILE = "indices.csc.index.npy"
"""... its row, int32, ascending within a term..."""
INDPTR_FILE = "indptr.csc.index.npy"
"""... and where each term begins in both, int64 [terms + 1]."""
VOCABULARY_FILE = "vocab.index.json"
PARAMETERS_FILE = "params.index.json"
MAXIMA_FILE = "maxima.npy"
"""Highest score of each term, float32. bm25s does not know this file; it opens the folder all the same."""


class BM25Ranker:
    """Ranks rows of an index folder. For one thread at a time: the stemmer keeps state."""

    quick = True
    how = "BM25"

    def __init__(self, folder: Path, analyzer: AnalyzerSettings) -> None:
        folder = folder / FOLDER
        with damaged(f"{folder}: not a readable BM25 index"):
            vocabulary: dict[str, int] = orjson.loads((folder / VOCABULARY_FILE).read_bytes())
            parameters = orjson.loads((folder / PARAMETERS_FILE).read_bytes())
            self._passages = int(parameters["num_docs"])
            self._data = _mapped(folder / DATA_FILE)
            self._indices = _mapped(folder / INDICES_FILE)
            self._indptr = _mapped(folder / INDPTR_FILE)
            self._maxima = np.load(folder / MAXIMA_FILE)
        self._analyzer = Analyzer(analyzer)
        self._term_ids = TermIds(self._analyzer, vocabulary.get)
        self._sums = np.zeros(RANGE_ROWS, np.float32)

    def rank(self, queries: list[str], topk: int) -> list[list[tuple[int, float]]]:
        """(row, score) of the best passages of each query, best first; fewer than `topk` where fewer
        match."""
        topk = min(topk, self._passages)
        terms: list[int] = []
        starts = [0]
        size = len(queries)
        for query in queries:
            terms += self._term_ids(query)
            starts.append(len(terms))
        rows = np.empty((size, topk), np.int32)
        scores = np.empty((size, topk), np.float32)
        counts = np.empty(size, np.int64)
        rank(
            self._data, self._indices, self._indptr, self._maxima, self._passages,
            np.array(terms, np.int64), np.array(starts, np.int64), rows, scores, counts, self._sums,
        )  # fmt: skip
        found = zip(rows.tolist(), scores.tolist(), counts.tolist(), strict=True)
        return [list(zip(r[:n], s[:n], strict=True)) for r, s, n in found]

    def normalise(self, query: str) -> str:
        """Queries of the same form get the same answer."""
        return " ".join(self._analyzer.lower(query).split())


def _mapped(path: Path) -> np.ndarray:
    """A memory-mapped array, as a plain one: the kernel would be compiled once more for numpy's memmap."""
    return np.asarray(np.load(path, mmap_mode="r"))
