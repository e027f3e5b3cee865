"""Searching an index folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from retriever_service.bm25.analysis import AnalyzerSettings
from retriever_service.dense.on_device import OnDevice
from retriever_service.dense.search import open_dense
from retriever_service.index_folder.description import BACKENDS, IndexInfo, verify
from retriever_service.index_folder.documents import OFFSETS_FILE, TEXT_FILE, Documents
from retriever_service.index_folder.rows import Rows
from retriever_service.index_folder.segments import (
    SegmentedDocuments,
    SegmentedRows,
    folders_of,
    read_deletions,
)
from retriever_service.ranking import HybridRanker, Ranker, Reranker
from retriever_service.search.search_index import RankedIndex
from services.common.loading.lazy import LazyModule

if TYPE_CHECKING:
    from retriever_service.bm25 import search as bm25
    from retriever_service.bm25.packed import search as packed
else:
    # A server over vectors or Qdrant needs no numba.
    bm25 = LazyModule("retriever_service.bm25.search")
    packed = LazyModule("retriever_service.bm25.packed.search")


READING = "reading the index"
COMPILING = "compiling the search, which later starts load compiled"
FIRST_QUERY = "searching a first time"


@dataclass(frozen=True)
class _Part:
    """The arguments for opening one part of an index folder."""

    folder: Path
    info: IndexInfo
    name: str | None
    model: str | None
    gpu: bool
    on_device: OnDevice | None
    dtype: str


def _open_bm25(part: _Part) -> Ranker:
    settings = part.info.settings
    analyzer = AnalyzerSettings(**settings["analyzer"])
    if settings.get("postings") != "packed":
        return bm25.BM25Ranker(part.folder, analyzer)
    deletions = read_deletions(part.folder, part.info)
    return packed.PackedRanker(
        folders_of(part.folder, part.info),
        analyzer,
        k1=settings["k1"],
        b=settings["b"],
        deleted=packed.Deleted(deletions["rows"], deletions["tokens"], deletions["frequencies"]),
    )


def _open_dense(part: _Part) -> Ranker:
    return open_dense(
        part.folder,
        part.info.settings,
        part.info.passages,
        name=part.name,
        model=part.model,
        gpu=part.gpu,
        on_device=part.on_device,
        dtype=part.dtype,
    )


OPENERS: dict[str, Callable[[_Part], Ranker]] = {"bm25": _open_bm25, "dense": _open_dense}
"""The parts that an index folder may have. `retriever_service.indexing.parts` builds them."""


def _open_passages(folder: Path, info: IndexInfo) -> tuple[Documents, Rows | None]:
    if not info.segments and not info.deletions:
        documents = Documents(folder / TEXT_FILE, folder / OFFSETS_FILE)
        return documents, Rows.of(folder, documents)
    folders = folders_of(folder, info)
    segmented = SegmentedDocuments(folders)
    return segmented, SegmentedRows(folders, segmented, read_deletions(folder, info)["rows"])


class Index(RankedIndex):
    """An open index folder.

    `model` names another place of the encoder of a dense index, or the encoder itself where the index does
    not name one; `name` is then its family. `dtype` is the number type of the encoder, `gpu` searches on the
    GPUs by FAISS, `on_device` searches by PyTorch, and `reranker` is a cross-encoder that reorders the best
    `rerank_depth` passages. `tell` is told what the opening does.
    """

    def __init__(
        self,
        folder: str | Path,
        corpus: str | Path | None = None,
        *,
        name: str | None = None,
        model: str | None = None,
        gpu: bool = False,
        on_device: OnDevice | None = None,
        dtype: str = "auto",
        reranker: Reranker | None = None,
        rerank_depth: int = 20,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        folder = Path(folder)
        tell(READING)
        info = verify(folder, corpus)
        documents, rows = _open_passages(folder, info)
        part = _Part(folder, info, name, model, gpu, on_device, dtype)
        rankers = [OPENERS[kind](part) for kind in BACKENDS[info.backend]]
        tell(COMPILING if "bm25" in BACKENDS[info.backend] else FIRST_QUERY)
        super().__init__(
            info,
            documents,
            rankers[0] if len(rankers) == 1 else HybridRanker(rankers),
            rows=rows,
            reranker=reranker,
            rerank_depth=rerank_depth,
        )
