"""Searching an index folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from retriever_service.bm25.analysis import AnalyzerSettings
from retriever_service.dense.search import open_dense
from retriever_service.description import BACKENDS, IndexInfo, verify
from retriever_service.documents import OFFSETS_FILE, TEXT_FILE, Documents
from retriever_service.ranking import HybridRanker, Ranker, Reranker
from retriever_service.rows import Rows
from retriever_service.search_index import RankedIndex
from services.common.lazy import LazyModule

if TYPE_CHECKING:
    from retriever_service.bm25 import search as bm25
else:
    # A server over vectors or Qdrant needs no numba.
    bm25 = LazyModule("retriever_service.bm25.search")


@dataclass(frozen=True)
class _Part:
    """The arguments for opening one part of an index folder."""

    folder: Path
    info: IndexInfo
    name: str | None
    model: str | None
    gpu: bool
    dtype: str


def _open_bm25(part: _Part) -> Ranker:
    return bm25.BM25Ranker(part.folder, AnalyzerSettings(**part.info.settings["analyzer"]))


def _open_dense(part: _Part) -> Ranker:
    return open_dense(
        part.folder,
        part.info.settings,
        part.info.passages,
        name=part.name,
        model=part.model,
        gpu=part.gpu,
        dtype=part.dtype,
    )


OPENERS: dict[str, Callable[[_Part], Ranker]] = {"bm25": _open_bm25, "dense": _open_dense}
"""The parts that an index folder may have. `retriever_service.indexing.parts` builds them."""


class Index(RankedIndex):
    """An open index folder.

    `model` names another place of the encoder of a dense index, or the encoder itself where the index does
    not name one; `name` is then its family. `dtype` is the number type of the encoder, `gpu` searches on the
    GPUs, and `reranker` is a cross-encoder that reorders the best `rerank_depth` passages.
    """

    def __init__(
        self,
        folder: str | Path,
        corpus: str | Path | None = None,
        *,
        name: str | None = None,
        model: str | None = None,
        gpu: bool = False,
        dtype: str = "auto",
        reranker: Reranker | None = None,
        rerank_depth: int = 20,
    ) -> None:
        folder = Path(folder)
        info = verify(folder, corpus)
        documents = Documents(folder / TEXT_FILE, folder / OFFSETS_FILE)
        part = _Part(folder, info, name, model, gpu, dtype)
        rankers = [OPENERS[kind](part) for kind in BACKENDS[info.backend]]
        super().__init__(
            info,
            documents,
            rankers[0] if len(rankers) == 1 else HybridRanker(rankers),
            rows=Rows.of(folder, documents),
            reranker=reranker,
            rerank_depth=rerank_depth,
        )
