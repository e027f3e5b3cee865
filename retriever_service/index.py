"""An index folder: what it holds, whether it is whole, and searching it.

`meta.json` is written last. It names the corpus (file, SHA-256), the settings, and every other file with its
size and checksum, so that a torn or truncated index is refused when it is opened, with the reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from retriever_service.documents import OFFSETS_FILE, TEXT_FILE, Documents
from retriever_service.errors import CorpusError, IndexInvalid, OtherFormat
from retriever_service.indexing.corpus import checksum, corpus_bytes
from retriever_service.ranking import HybridRanker, Ranker, Reranker
from retriever_service.rows import Rows

FORMAT = 2
META_FILE = "meta.json"
_FOLDERS = {"bm25": ("bm25",), "dense": ("dense",), "hybrid": ("bm25", "dense")}
"""The folders of each backend."""
_WHOLE_BYTES = 64 << 20
_END_BYTES = 1 << 20


@dataclass(frozen=True)
class IndexInfo:
    """What `unspiral index info` prints."""

    format: int
    backend: str
    corpus: str
    corpus_sha256: str
    corpus_bytes: int
    passages: int
    skipped: int
    skipped_reasons: list[str]
    settings: dict
    files: dict[str, dict]
    bytes: int
    """Size on disk."""


def file_digest(path: Path) -> str:
    """SHA-256 of a file up to 64 MiB; of a larger one, of its first and last MiB and its size."""
    size, digest = path.stat().st_size, hashlib.sha256()
    with path.open("rb") as file:
        if size <= _WHOLE_BYTES:
            digest.update(file.read())
        else:
            digest.update(file.read(_END_BYTES))
            file.seek(size - _END_BYTES)
            digest.update(file.read() + str(size).encode())
    return digest.hexdigest()


def read_info(folder: str | Path) -> IndexInfo:
    """The description of an index, its files unchecked. Raises IndexInvalid."""
    folder = Path(folder)
    path = folder / META_FILE
    if not folder.is_dir():
        raise IndexInvalid(
            f"index {folder}: no such folder; `unspiral index build --corpus FILE --out {folder}` makes one"
        )
    if not path.is_file():
        what = (
            "a Lucene index, which can't be read here"
            if list(folder.glob("segments_*"))
            else f"no index: it has no {META_FILE}"
        )
        raise IndexInvalid(
            f"index {folder}: {what}; `unspiral index build --corpus FILE --out DIR` makes one"
        )
    try:
        meta = orjson.loads(path.read_bytes())
        if meta.get("format") != FORMAT:
            raise OtherFormat(
                f"index {folder}: format {meta.get('format')}, this version reads {FORMAT}; build it again, with --overwrite"
            )
        return IndexInfo(**meta, bytes=sum(f["bytes"] for f in meta["files"].values()))
    except (orjson.JSONDecodeError, TypeError, KeyError, AttributeError) as error:
        raise IndexInvalid(f"{path}: damaged ({error}); build the index again") from None


def verify(folder: str | Path, corpus: str | Path | None = None) -> IndexInfo:
    """Check every file of an index against its recorded size and checksum, and the corpus, if given. Raises
    IndexInvalid."""
    folder, info = Path(folder), read_info(folder)
    for needed in (TEXT_FILE, OFFSETS_FILE, *_FOLDERS.get(info.backend, ())):
        if not any(name == needed or name.startswith(f"{needed}/") for name in info.files):
            raise IndexInvalid(f"{folder / META_FILE}: damaged (it lists no {needed}); build the index again")
    for name, expected in info.files.items():
        path = folder / name
        if not path.is_file():
            raise IndexInvalid(f"{path}: missing; build the index again")
        size = path.stat().st_size
        if size != expected["bytes"]:
            raise IndexInvalid(
                f"{path}: {size} bytes instead of {expected['bytes']}, so it was cut off; build the index again"
            )
        if file_digest(path) != expected["sha256"]:
            raise IndexInvalid(
                f"{path}: its checksum does not match {META_FILE}, so it is damaged; build the index again"
            )
    if corpus is not None:
        corpus = Path(corpus)
        if not corpus.exists():
            raise CorpusError(f"corpus {corpus}: no such file")
        if corpus_bytes(corpus) != info.corpus_bytes or checksum(corpus) != info.corpus_sha256:
            raise IndexInvalid(
                f"index {folder} was built from another corpus ({info.corpus}) than {corpus}; build it again"
            )
    return info


class Index:
    """An open index folder. `search` must be called from one thread at a time. `rows` gives whole rows of the
    corpus, or is None.

    `model` names another place of the encoder of a dense index, or, where the index does not say what it is,
    the encoder, and `name` its family; `dtype` its numbers, `gpu` searches it on the GPUs, `reranker` is a
    cross-encoder that orders the best `rerank_depth` passages anew.
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
        self.info = verify(folder, corpus)
        self.documents = Documents(folder / TEXT_FILE, folder / OFFSETS_FILE)
        self.rows = Rows.of(folder, self.documents)
        self.ranker = _open_ranker(folder, self.info, name, model, gpu, dtype)
        self.reranker, self._depth = reranker, rerank_depth
        self.quick = self.ranker.quick and reranker is None
        self.ranker.rank(["warm up"], 1)  # compiles the kernel, or loads it compiled

    def search(self, queries: Sequence[str], topk: int) -> list[list[tuple[bytes, float]]]:
        """(document as JSON bytes, score) of the best passages of each query, best first. A blank query finds
        nothing."""
        if self.reranker is not None:
            return self._search_reranked(list(queries), topk)
        raw = self.documents.raw
        return [
            [(raw(row), score) for row, score in ranked] for ranked in self.ranker.rank(list(queries), topk)
        ]

    def _search_reranked(self, queries: list[str], topk: int) -> list[list[tuple[bytes, float]]]:
        ranked = self.ranker.rank(queries, max(topk, self._depth))
        texts = [[self.documents.get(row)[1] for row, _ in one] for one in ranked]
        orders = self.reranker.order(list(zip(queries, texts, strict=True)), topk)
        return [
            [(self.documents.raw(one[i][0]), score) for i, score in order]
            for one, order in zip(ranked, orders, strict=True)
        ]

    def normalise(self, query: str) -> str:
        """Queries of the same form get the same answer. A reranker reads the query as it is, capitals and
        all."""
        return query if self.reranker is not None else self.ranker.normalise(query)

    def close(self) -> None:
        """Give the mapped files back."""
        self.documents.close()


def _open_ranker(
    folder: Path, info: IndexInfo, name: str | None, model: str | None, gpu: bool, dtype: str
) -> Ranker:
    """The ranker of a folder. What a backend needs is imported only for it: numba for BM25, torch and FAISS
    for dense."""
    rankers: list[Ranker] = []
    if info.backend in ("bm25", "hybrid"):
        from retriever_service.bm25.analysis import AnalyzerSettings
        from retriever_service.bm25.search import BM25Ranker

        rankers.append(BM25Ranker(folder, AnalyzerSettings(**info.settings["analyzer"])))
    if info.backend in ("dense", "hybrid"):
        from retriever_service.dense.search import open_dense

        rankers.append(
            open_dense(folder, info.settings, info.passages, name=name, model=model, gpu=gpu, dtype=dtype)
        )
    return rankers[0] if len(rankers) == 1 else HybridRanker(rankers)
