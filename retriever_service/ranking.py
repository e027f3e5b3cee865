"""What rankers have in common, their fusion, and the protocol of a reranker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

RRF_K = 60
HYBRID_DEPTH = 100


class Ranker(Protocol):
    """Orders the rows of one corpus by a query. Used by one thread at a time."""

    quick: bool
    """Whether a search may be so cheap that it is done in the event loop."""
    how: str
    """How it searches, in a few words."""

    def rank(self, queries: list[str], topk: int) -> list[list[tuple[int, float]]]:
        """(row, score) of the best passages of each query, best first; fewer than `topk` where fewer
        match."""

    def normalise(self, query: str) -> str:
        """A form that two queries share only if they get the same answer."""


@dataclass(frozen=True)
class Statistics:
    """What BM25 counts over all passages that are searched together, whichever index holds them."""

    passages: int
    tokens: int
    """Sum of their lengths in terms."""
    frequencies: Mapping[str, int] = field(default_factory=dict)
    """How many of them have each term; where it is used, the terms of the queries alone."""


@runtime_checkable
class RankerOfPart(Ranker, Protocol):
    """A ranker that can score its rows as one index of more passages than its own does."""

    statistics: Statistics
    """Of its own passages, without frequencies."""

    def rank_among(self, queries: list[str], topk: int, whole: Statistics) -> list[list[tuple[int, float]]]:
        """As `rank`, by the statistics of all passages. `whole` has the frequency of each term that a query
        and a row here share."""

    def frequencies_of(self, terms: Sequence[str]) -> list[int]:
        """How many of its own passages have each of these terms."""


Passages = tuple[str, Sequence[str]]
"""A query and the passages to order by it."""
Order = list[tuple[int, float]]
"""Positions of passages and their scores, best first."""


class Reranker(Protocol):
    """Reorders passages by a query. Used by one thread at a time."""

    def order(self, items: Sequence[Passages], topk: int) -> list[Order]:
        """For each (query, passages): (position, score) of the best `topk` passages, best first."""


class HybridRanker:
    """Reciprocal rank fusion (Cormack, Clarke and Buettcher 2009): the score of a row is the sum of 1 / (60 +
    its rank) over rankers."""

    quick = False

    def __init__(self, rankers: Sequence[Ranker]) -> None:
        self._rankers = rankers
        self.how = " and ".join(ranker.how for ranker in rankers)

    def rank(self, queries: list[str], topk: int) -> list[list[tuple[int, float]]]:
        """As `Ranker.rank`; each ranker is asked for at least 100 rows. Equal scores go by row."""
        depth = max(topk, HYBRID_DEPTH)
        columns = [ranker.rank(queries, depth) for ranker in self._rankers]
        return [fuse(list(lists), topk) for lists in zip(*columns, strict=True)]

    def normalise(self, query: str) -> str:
        """The query itself: some tokenizers see every space."""
        return query


def fuse(lists: list[list[tuple[int, float]]], topk: int) -> list[tuple[int, float]]:
    """One ranking out of several."""
    scores: dict[int, float] = {}
    for ranked in lists:
        for place, (row, _) in enumerate(ranked, 1):
            scores[row] = scores.get(row, 0.0) + 1 / (RRF_K + place)
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))[:topk]
