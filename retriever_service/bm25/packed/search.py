"""BM25 over packed postings in one or several segments, which give the scores of one index of all their
passages.

Scores are those of `retriever_service.bm25.search`; number of passages, mean length and document frequencies
are summed over the segments, and less what was deleted. A row's score is summed up from the rarest term to
the most frequent one, so that it does not depend on how the passages lie in segments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from retriever_service.bm25.analysis import Analyzer, AnalyzerSettings
from retriever_service.bm25.packed.blocks import find_term
from retriever_service.bm25.packed.files import PackedFiles, open_packed
from retriever_service.bm25.packed.impact_kernel import search_batch_impacts
from retriever_service.bm25.packed.impacts import WINDOW
from retriever_service.bm25.packed.kernel import search_batch
from retriever_service.ranking import Statistics

_MEMO_WORDS = 1_000_000


@dataclass(frozen=True)
class Deleted:
    """Passages that are deleted and not merged away yet, and their share of the statistics."""

    rows: Sequence[int] = ()
    """Rows of the whole index, ascending."""
    tokens: int = 0
    """Sum of their lengths."""
    frequencies: Mapping[str, int] = field(default_factory=dict)
    """How many of them have each term."""


NOTHING_DELETED = Deleted()


def idf_of(passages: int, frequency: int) -> float:
    """Lucene's weight of a term that `frequency` of so many passages have."""
    return float(np.log(1 + (passages - frequency + 0.5) / (frequency + 0.5)))


class _Segment:
    """One segment, with what the statistics of the whole index make of it."""

    def __init__(self, files: PackedFiles, base: int) -> None:
        self.files = files
        self.base = base
        self.rows = len(files.lengths)
        self._longest = int(files.lengths.max())

    def bury(self, deleted: Sequence[int]) -> None:
        own = np.array([row - self.base for row in deleted if 0 <= row - self.base < self.rows], np.int64)
        # A bit per row, and no byte where none is deleted: the kernel then asks nothing per row.
        self.dead = np.zeros((self.rows + 7) // 8 if len(own) else 0, np.uint8)
        np.bitwise_or.at(self.dead, own >> 3, (1 << (own & 7)).astype(np.uint8))

    def prepare(self, k1: float, b: float, mean: float) -> None:
        self.norm = k1 * (1 - b + b * np.arange(self._longest + 1, dtype=np.uint32) / mean)
        # With the mean length grown by a factor, tf / (tf + norm) grows by that factor at most.
        self.drift = max(1.0, mean / max(self.files.mean, 1e-9))


class PackedRanker:
    """Ranks the rows of an index with packed postings: row numbers go on from segment to segment. For one
    thread at a time: the stemmer keeps state."""

    quick = True
    how = "BM25, packed"

    def __init__(
        self,
        folders: Sequence[Path],
        analyzer: AnalyzerSettings,
        *,
        k1: float,
        b: float,
        deleted: Deleted = NOTHING_DELETED,
    ) -> None:
        self._analyzer = Analyzer(analyzer)
        self._segments: list[_Segment] = []
        rows = 0
        tokens = -deleted.tokens
        for folder in folders:
            files = open_packed(folder)
            self._segments.append(_Segment(files, rows))
            rows += len(files.lengths)
            tokens += int(files.lengths.sum(dtype=np.int64))
        self._rows = rows
        self._deleted = deleted
        self._k1 = k1
        self._b = b
        self._mean = 0.0
        self.statistics = Statistics(rows - len(deleted.rows), tokens)
        for segment in self._segments:
            segment.bury(deleted.rows)
        self._prepare(self.statistics)
        self._sums = np.zeros(WINDOW, np.float32)
        self._forget()

    def _prepare(self, whole: Statistics) -> None:
        """Take the mean length of these passages."""
        mean = max(whole.tokens / max(whole.passages, 1), 1e-9)
        # The mean moves with each added or deleted passage, and for every query that names its own
        # statistics.
        if mean != self._mean:
            self._mean = mean
            for segment in self._segments:
                segment.prepare(self._k1, self._b, mean)

    def _forget(self) -> None:
        self._of_word: dict[str, int] = {}
        self._of_term: dict[str, int] = {}
        self._numbers: list[tuple[int, ...]] = []
        self._texts: list[str] = []
        self._frequencies: list[int] = []
        self._idfs: list[float] = []

    def rank(self, queries: list[str], topk: int) -> list[list[tuple[int, float]]]:
        """(row, score) of the best passages of each query, best first; fewer than `topk` where fewer
        match."""
        self._prepare(self.statistics)
        return self._rank(queries, topk, self._idfs.__getitem__)

    def rank_among(self, queries: list[str], topk: int, whole: Statistics) -> list[list[tuple[int, float]]]:
        """As RankerOfPart: the scores are those of an index of all passages that `whole` counts."""
        self._prepare(whole)
        frequencies = whole.frequencies

        def idf(term: int) -> float:
            return idf_of(whole.passages, frequencies.get(self._texts[term], 0))

        return self._rank(queries, topk, idf)

    def frequencies_of(self, terms: Sequence[str]) -> list[int]:
        """As RankerOfPart."""
        if len(self._of_term) > _MEMO_WORDS:
            self._forget()
        numbers = [self._number(term) for term in terms]
        return [self._frequencies[number] if number >= 0 else 0 for number in numbers]

    def _rank(
        self, queries: list[str], topk: int, idf: Callable[[int], float]
    ) -> list[list[tuple[int, float]]]:
        topk = max(1, min(topk, self.statistics.passages))
        size = len(queries)
        known: list[int] = []
        weights: list[int] = []
        starts = [0]
        # The words of strangers' queries have no end: all is forgotten at once, and the frequent ones are
        # soon there again.
        if len(self._of_word) > _MEMO_WORDS:
            self._forget()
        values: list[float] = []
        for query in queries:
            found = Counter(self._terms(query))
            of_term = {term: idf(term) for term in found}
            # Rarest first. Sums in single precision depend on their order: this one is the same however the
            # passages lie in segments.
            for term in sorted(found, key=lambda term: -found[term] * of_term[term]):
                known.append(term)
                values.append(of_term[term])
                weights.append(found[term])
            starts.append(len(known))
        numbers = [self._numbers[term] for term in known]
        idfs = np.array(values, np.float64)
        scores = np.empty((size, topk), np.float32)
        rows = np.empty((size, topk), np.int64)
        counts = np.zeros(size, np.int64)
        of_segment = np.array(numbers, np.int64).reshape(len(numbers), len(self._segments))
        for i, segment in enumerate(self._segments):
            files = segment.files
            of_queries = (
                np.ascontiguousarray(of_segment[:, i]), np.array(weights, np.float32), idfs,
                np.array(starts, np.int64), scores, rows, counts, self._sums,
            )  # fmt: skip
            of_index = (files.lengths, segment.dead, segment.norm, segment.drift, segment.base)
            if files.impacts is None:
                search_batch(*files.blocks, *of_index, *of_queries)
                continue
            impacts = files.impacts
            search_batch_impacts(
                *files.blocks, *of_index, impacts.terms, impacts.begins, impacts.postings, impacts.levels,
                impacts.windows, impacts.tops, *of_queries,
            )  # fmt: skip
        ranked = zip(rows.tolist(), scores.tolist(), counts.tolist(), strict=True)
        return [list(zip(r[:n], s[:n], strict=True)) for r, s, n in ranked]

    def _terms(self, query: str) -> list[int]:
        """Numbers of the terms of a query that some passage has."""
        known = self._of_word
        terms = []
        for word in self._analyzer.words(query):
            number = known.get(word)
            if number is None:
                number = known[word] = self._number(self._analyzer.term(word))
            if number >= 0:
                terms.append(number)
        return terms

    def _number(self, term: str | None) -> int:
        """Number of a term, given at its first look-up, or -1 where no passage has it."""
        if term is None:
            return -1
        number = self._of_term.get(term)
        if number is None:
            number = self._of_term[term] = self._look_up(term)
        return number

    def _look_up(self, term: str) -> int:
        wanted = np.frombuffer(term.encode(), np.uint8)
        numbers = []
        frequency = -self._deleted.frequencies.get(term, 0)
        for segment in self._segments:
            files = segment.files
            number = int(find_term(files.text, files.offsets, files.order, wanted))
            numbers.append(number)
            frequency += int(files.frequencies[number]) if number >= 0 else 0
        if frequency <= 0:
            return -1
        self._numbers.append(tuple(numbers))
        self._texts.append(term)
        self._frequencies.append(frequency)
        self._idfs.append(idf_of(self.statistics.passages, frequency))
        return len(self._numbers) - 1

    def normalise(self, query: str) -> str:
        """Queries of the same form get the same answer."""
        return " ".join(self._analyzer.lower(query).split())
