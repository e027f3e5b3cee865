"""Dense search: an encoder and a FAISS index, memory-mapped where the index type allows it (flat,
scalar-quantised and HNSW do), or PyTorch over the vectors that it holds.

FAISS segfaults or serialises when several threads search one index; here only the owner thread of the server
does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np

from retriever_service.dense import exact
from retriever_service.dense.encoder import Encoder, EncoderSettings, family_of
from retriever_service.dense.exact import ExactVectors
from retriever_service.dense.lists import attach, has_lists, scanned_fast
from retriever_service.dense.on_device import DeviceSearch, OnDevice, devices_of
from retriever_service.errors import IndexInvalid
from retriever_service.index_folder.description import IndexSettings
from services.common.errors import EnvironmentLacks, UserError
from services.common.loading.extras import needed_for

FOLDER = "dense"
INDEX_FILE = "faiss.index"
_FRONT = 4


def import_faiss():
    """The module `faiss`, or EnvironmentLacks saying how to get it."""
    with needed_for("dense search", "dense"):
        import faiss
    return faiss


def open_faiss(path: Path):
    """A FAISS index file, memory-mapped if it can be. Raises IndexInvalid for one that is torn, of another
    kind, or not by inner product."""
    faiss = import_faiss()
    with refused_by_faiss(lambda why: IndexInvalid(f"{path}: not a readable FAISS index ({why})")):
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:  # its scores would be read upside down
        raise IndexInvalid(
            f"{path}: ranks by FAISS metric {index.metric_type} (1 is L2 distance); expected one by inner "
            "product, as published ones are"
        )
    if has_lists(path):
        attach(faiss, index, path)
        return scanned_fast(faiss, index)
    return index


@contextmanager
def refused_by_faiss(told: Callable[[str], Exception]) -> Iterator[None]:
    """Around calls of FAISS: raises what `told` makes of its reason, which comes without where in its source
    it was found."""
    try:
        yield
    except RuntimeError as error:
        raise told(" ".join(str(error).split()).rpartition("Error: ")[2][:200]) from None


def made_of(kind: str, what: str) -> AbstractContextManager[None]:
    """Around the making of an index of this type: raises UserError where it can't be made of `what`."""
    return refused_by_faiss(lambda why: UserError(f"type {kind!r}: can't be made of {what} ({why})"))


def set_search_effort(index, nprobe: int | None, ef_search: int | None) -> None:
    """Set the number of lists (IVF) or the width of the front (HNSW) that a search visits. Other indexes
    ignore both. `ef_search` is also for a graph over lists; by default its front is four times `nprobe`."""
    faiss = import_faiss()
    inner = faiss.downcast_index(index)
    graph = inner
    if isinstance(inner, faiss.IndexIVF):
        inner.nprobe = nprobe or inner.nprobe
        graph = faiss.downcast_index(inner.quantizer)
        ef_search = ef_search or _FRONT * inner.nprobe
    if ef_search and isinstance(graph, faiss.IndexHNSW):
        graph.hnsw.efSearch = ef_search


class DenseRanker:
    """Ranks the rows of a FAISS index. For one thread at a time."""

    quick = False

    def __init__(
        self,
        path: Path,
        encoder: Encoder,
        passages: int,
        *,
        nprobe: int | None = None,
        ef_search: int | None = None,
        gpu: bool = False,
        on_device: OnDevice | None = None,
        rescore: int = 0,
        rescore_dtype: str = "float16",
        kind: str = "",
    ) -> None:
        """`on_device` searches the vectors by PyTorch instead of FAISS. `kind` is the type of the index, for
        `how`."""
        self._encoder = encoder
        self._index = open_faiss(path)
        vectors = self._index.ntotal
        if vectors != passages:
            raise IndexInvalid(
                f"{path}: holds {vectors} vectors for {passages} passages; it belongs to another corpus"
            )
        if self._index.d != encoder.dimension:
            raise IndexInvalid(
                f"{path}: vectors of {self._index.d} numbers, those of {encoder.settings.model} have "
                f"{encoder.dimension}"
            )
        set_search_effort(self._index, nprobe, ef_search)
        self._total = vectors
        self._rescore = rescore
        self._exact = None
        if rescore:
            self._exact = ExactVectors(path.with_name(exact.FILE), rescore_dtype, encoder.dimension, passages)
        self.how = f"FAISS {kind}".rstrip()
        """How it searches, in a few words."""
        if gpu:
            self._index = _to_gpu(self._index)
            self.how += " on GPUs, in half precision"
        elif on_device is not None:
            self._search_by(on_device, path, kind)

    def _search_by(self, wanted: OnDevice, path: Path, kind: str) -> None:
        """Search exactly on devices: the exact vectors beside the index, or its own."""
        vectors = self._exact.rows if self._exact is not None else _flat_rows(self._index)
        if vectors is None:
            raise UserError(
                f"--dense-device {wanted.device}: {path} does not hold its vectors as they are"
                + (f" ({kind})" if kind else "")
                + "; accepted with an index of type Flat, or one that `index convert --rescore` made"
            )
        self._mapped = self._index  # `vectors` may be its memory
        self._index = DeviceSearch(vectors, devices_of(wanted.device), wanted.dtype)
        self._total = len(vectors)
        self._rescore = 0
        self._exact = None
        self.how = self._index.how

    def rank(self, queries: list[str], topk: int) -> list[list[tuple[int, float]]]:
        """(row, inner product) of the nearest passages of each query, best first; equal scores by row. A
        blank query has none."""
        asked = [i for i, query in enumerate(queries) if query and not query.isspace()]
        ranked: list[list[tuple[int, float]]] = [[] for _ in queries]
        if not asked:
            return ranked
        vectors = self._encoder.queries([queries[i] for i in asked])
        scores, rows = self._index.search(vectors, min(topk * max(1, self._rescore), self._total))
        if self._exact is not None:
            for i, vector, found in zip(asked, vectors, rows, strict=True):
                ranked[i] = self._exact.best(vector, found, topk)
            return ranked
        order = np.lexsort((rows, -scores), axis=1)
        rows = np.take_along_axis(rows, order, 1).tolist()
        scores = np.take_along_axis(scores, order, 1).tolist()
        for i, r, s in zip(asked, rows, scores, strict=True):
            ranked[i] = [(row, score) for row, score in zip(r, s, strict=True) if row >= 0]
        return ranked

    def normalise(self, query: str) -> str:
        """The query unchanged, because some tokenizers see every space."""
        return query


def open_dense(
    folder: Path,
    settings: IndexSettings,
    passages: int,
    *,
    name: str | None = None,
    model: str | None = None,
    gpu: bool = False,
    on_device: OnDevice | None = None,
    dtype: str = "auto",
) -> DenseRanker:
    """The ranker of an index folder. `model` names another place of the same encoder; another encoder is
    refused. `name` is the family of one that the index does not know."""
    made_with = dict(settings["encoder"])
    if not made_with["model"]:  # converted from a FAISS file, which does not name it
        if not model:
            raise UserError(
                f"index {folder}: does not name its encoder; give it with --retriever_model (index search: "
                "--model)"
            )
        if made_with["family"] == "auto":
            made_with["family"] = family_of(name, model)
    encoder = Encoder(EncoderSettings(**made_with | ({"model": model} if model else {})), dtype=dtype)
    if settings["fingerprint"] and encoder.fingerprint != settings["fingerprint"]:
        raise IndexInvalid(
            f"index {folder}: was not made by the encoder {encoder.settings.model}; give its own with "
            "--retriever_model"
        )
    return DenseRanker(
        folder / FOLDER / INDEX_FILE,
        encoder,
        passages,
        nprobe=settings["nprobe"],
        ef_search=settings["ef_search"],
        gpu=gpu,
        on_device=on_device,
        kind=settings.get("type", ""),
        rescore=settings.get("rescore", 0),
        rescore_dtype=settings.get("rescore_dtype", "float16"),
    )


def _flat_rows(index) -> np.ndarray | None:
    """The vectors of a flat index, float32 [n, d], where they lie; None for another type."""
    faiss = import_faiss()
    flat = faiss.downcast_index(index)
    if not isinstance(flat, faiss.IndexFlat):
        return None
    return faiss.rev_swig_ptr(flat.get_xb(), flat.ntotal * flat.d).reshape(flat.ntotal, flat.d)


def _to_gpu(index):
    faiss = import_faiss()
    if not hasattr(faiss, "StandardGpuResources") or not faiss.get_num_gpus():
        raise EnvironmentLacks(
            "--faiss_gpu: this FAISS sees no GPU (faiss-cpu searches on the CPU); leave the flag out"
        )
    options = faiss.GpuMultipleClonerOptions()
    options.useFloat16 = True
    options.shard = True
    return faiss.index_cpu_to_all_gpus(index, co=options)
