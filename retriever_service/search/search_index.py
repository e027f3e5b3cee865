"""The protocol of everything that can be searched: an index folder, a FAISS file, a remote collection.

Service, batcher and command line know this protocol alone. `retriever_service.search.backends` opens what has
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from retriever_service.index_folder.description import IndexInfo
from retriever_service.index_folder.documents import Documents
from retriever_service.index_folder.rows import Rows
from retriever_service.ranking import Ranker, Reranker

Hits = list[tuple[bytes, float]]
"""Passages of one query, best first: the JSON bytes that are sent, and the score."""


class PartHits(list[tuple[bytes, float]]):
    """Hits of a query that not all shards were searched for."""

    def __init__(self, hits: Hits, missing: str) -> None:
        super().__init__(hits)
        self.missing = missing
        """The shards that are missing, and why, in one line."""


class SearchIndex(Protocol):
    """An open index. One thread at a time calls it."""

    info: IndexInfo
    quick: bool
    """Whether a search may be so cheap that the event loop itself does it."""
    rows: Rows | None
    """Whole rows of the corpus; None where the index holds passages alone."""
    reranker: Reranker | None
    """The cross-encoder that reorders the best passages; None for none."""

    def search(self, queries: Sequence[str], topk: int) -> list[Hits]:
        """Hits of each query, in order; fewer than `topk` where fewer match, none for a blank query.

        Raises RetrieverUnavailable where a remote engine does not answer, never an empty result instead.
        """

    def normalise(self, query: str) -> str:
        """A form that two queries share only if they get the same answer: the key of the result cache."""

    def close(self) -> None:
        """Give mapped files and connections back."""


@runtime_checkable
class ChangingIndex(SearchIndex, Protocol):
    """An index whose content changes while it is open."""

    on_change: Callable[[], None]
    """Called, from any thread, when `info` is another one."""


class RankedIndex:
    """A SearchIndex over passages on this machine: a ranker orders their rows, a reranker may reorder the
    best of them."""

    def __init__(
        self,
        info: IndexInfo,
        documents: Documents,
        ranker: Ranker,
        *,
        rows: Rows | None = None,
        reranker: Reranker | None = None,
        rerank_depth: int = 20,
    ) -> None:
        self.info = info
        self.documents = documents
        self.ranker = ranker
        self.rows = rows
        self.reranker = reranker
        self._depth = rerank_depth
        self.quick = ranker.quick and reranker is None
        self.how = ranker.how
        """How it is searched, in a few words, for those who look at the health of a server."""
        ranker.rank(["warm up"], 1)  # compiles the kernel, or loads it compiled

    def search(self, queries: Sequence[str], topk: int) -> list[Hits]:
        """As SearchIndex."""
        if self.reranker is not None:
            return self._search_reranked(self.reranker, list(queries), topk)
        return self.with_text(self.ranker.rank(list(queries), topk))

    def with_text(self, ranked: Sequence[Sequence[tuple[int, float]]]) -> list[Hits]:
        """The passages of rows and scores."""
        raw = self.documents.raw
        return [[(raw(row), score) for row, score in one] for one in ranked]

    def _search_reranked(self, reranker: Reranker, queries: list[str], topk: int) -> list[Hits]:
        ranked = self.ranker.rank(queries, max(topk, self._depth))
        texts = [[self.documents.get(row)[1] for row, _ in one] for one in ranked]
        orders = reranker.order(list(zip(queries, texts, strict=True)), topk)
        return [
            [(self.documents.raw(one[i][0]), score) for i, score in order]
            for one, order in zip(ranked, orders, strict=True)
        ]

    def normalise(self, query: str) -> str:
        """As SearchIndex. A reranker reads the query as it is, capitals and all."""
        return query if self.reranker is not None else self.ranker.normalise(query)

    def close(self) -> None:
        """Give the mapped files back."""
        self.documents.close()
