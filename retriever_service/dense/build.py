"""Writes FAISS indexes: a flat one straight to disk while passages are encoded, and any other type from the
flat one, with the recall that it costs."""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from retriever_service.dense.exact import FILE as EXACT_FILE
from retriever_service.dense.exact import ExactVectors, flat_vectors, write_exact
from retriever_service.dense.inverted import write_inverted
from retriever_service.dense.search import (
    FOLDER,
    INDEX_FILE,
    import_faiss,
    made_of,
    open_faiss,
    refused_by_faiss,
    set_search_effort,
)
from services.common.errors import EnvironmentLacks, UserError
from services.common.files import move

_BLOCK_ROWS = 65_536
_TRAIN_ROWS_PER_LIST = 64


def flat_header(dimension: int, vectors: int) -> bytes:
    """The header of a flat FAISS file with inner product. The vectors follow it as they come in."""
    faiss = import_faiss()
    header = bytearray(faiss.serialize_index(faiss.IndexFlatIP(dimension)).tobytes())
    struct.pack_into("<q", header, 8, vectors)
    struct.pack_into("<q", header, len(header) - 8, vectors * dimension)
    return bytes(header)


def write_dense(
    work: Path, dimension: int, vectors: int, kind: str, progress: Callable[[int, int], None]
) -> None:
    """Make `work/dense/faiss.index` from the file `work/vectors` that a scan wrote."""
    flat = work / "vectors"
    target = work / FOLDER / INDEX_FILE
    header = flat_header(dimension, vectors)
    target.parent.mkdir(exist_ok=True)
    with flat.open("r+b") as file:
        file.write(header)
    if kind == "Flat":
        target.unlink(missing_ok=True)
        try:
            os.link(flat, target)  # and not moved: a build that is killed now still has what it goes on from
        except OSError:
            move(flat, target)
    else:
        convert(flat, target, kind, progress=progress)


def make_type(dimension: int, kind: str, vectors: int):
    """An empty FAISS index of a type such as Flat, SQfp16, SQ8, HNSW32 or `IVF,SQ8`, whose number of lists
    follows from the number of vectors. Raises UserError for a type that FAISS does not know."""
    faiss = import_faiss()
    lists = max(1, min(int(4 * math.sqrt(vectors)), vectors // 39 or 1))
    spelled = re.sub(r"\bIVF(?=[,_])", f"IVF{lists}", kind)
    accepted = "Flat, SQfp16, SQ8, `IVF,Flat`, `IVF,SQ8`, HNSW32, or another factory string of FAISS"
    with refused_by_faiss(lambda why: UserError(f"type {kind!r}: accepted are {accepted}")):
        return faiss.index_factory(dimension, spelled, faiss.METRIC_INNER_PRODUCT)


def stored_bytes(dimension: int, kind: str) -> int:
    """Bytes on disk per vector of a type; an estimate for graphs. Raises UserError for a type that FAISS does
    not know."""
    made = make_type(dimension, kind, 100_000)
    faiss = import_faiss()
    links = 8 * made.hnsw.nb_neighbors(1) if isinstance(made, faiss.IndexHNSW) else 0
    try:
        return (made.storage if links else made).sa_code_size() + links + 8 * isinstance(made, faiss.IndexIVF)
    except RuntimeError:  # a type without codes of its own
        return 4 * dimension + links


def convert(
    source: Path, out: Path, kind: str, *, nprobe: int | None = None, ef_search: int | None = None,
    seed: int = 0, progress: Callable[[int, int], None] | None = None,
):  # fmt: skip
    """Make an index of another type from the vectors of `source`, a block at a time, and write it to `out`.
    Returns it. Scalar quantisers (SQ8, SQfp16, ...) take bounded memory, other types are made in memory."""
    faiss = import_faiss()
    flat = open_faiss(source)
    n = flat.ntotal
    made = make_type(flat.d, kind, n)

    def blocks() -> Iterator[np.ndarray]:
        for begin in range(0, n, _BLOCK_ROWS):
            yield flat.reconstruct_n(begin, min(_BLOCK_ROWS, n - begin))
            if progress:
                progress(min(begin + _BLOCK_ROWS, n), n)

    # More lists or codes than vectors to learn them from; or the type takes no vectors in order.
    with made_of(kind, f"{n:,} vectors of {flat.d} numbers"):
        if not made.is_trained:
            wanted = max(_TRAIN_ROWS_PER_LIST * getattr(made, "nlist", 0), 20_000)
            rows = np.sort(np.random.default_rng(seed).permutation(n)[: min(wanted, n)])
            made.train(np.stack([flat.reconstruct(int(row)) for row in rows]))
        if isinstance(made, faiss.IndexScalarQuantizer):
            _write_codes(made, out, blocks(), n)
        else:
            for block in blocks():
                made.add(block)
            _write(made, out)
    opened = open_faiss(out)
    set_search_effort(opened, nprobe, ef_search)
    return opened


def _write(index, out: Path) -> None:
    with refused_by_faiss(lambda why: EnvironmentLacks(f"{out}: can't be written ({why})")):
        import_faiss().write_index(index, str(out))


def _write_codes(made, out: Path, blocks: Iterable[np.ndarray], vectors: int) -> None:
    """Write an empty scalar quantiser and, as they come, the codes of its vectors, which are the last part of
    its file, behind their number of bytes."""
    _write(made, out)
    with out.open("r+b") as file:
        first = file.seek(0, os.SEEK_END)
        for block in blocks:
            file.write(made.sa_encode(block))
        file.seek(8)
        file.write(struct.pack("<q", vectors))
        file.seek(first - 8)
        file.write(struct.pack("<q", vectors * made.sa_code_size()))


def write_rescored(
    source: Path, work: Path, kind: str, dtype: str, progress: Callable[[int, int], None]
) -> None:
    """Make `work/dense/` of a type with the exact vectors beside it, from the vectors of `source`. Inverted
    lists take bounded memory and are gone on with after a kill; other types are made as by `convert`."""
    faiss = import_faiss()
    flat = open_faiss(source)
    folder = work / FOLDER
    n = flat.ntotal
    header = flat_header(flat.d, n)
    plain = type(faiss.downcast_index(flat)) is faiss.IndexFlatIP or isinstance(flat, faiss.IndexFlat)
    mapped = flat_vectors(source, header, flat.d, n) if plain else None

    def vectors(begin: int, size: int) -> np.ndarray:
        if mapped is None:
            return flat.reconstruct_n(begin, size)
        return np.ascontiguousarray(mapped[begin : begin + size])

    write_exact(vectors, n, folder / EXACT_FILE, dtype, _BLOCK_ROWS, lambda done: progress(done, 2 * n))
    made = make_type(flat.d, kind, n)
    if isinstance(made, faiss.IndexIVF):
        scratch = work / "lists"
        write_inverted(made, kind, vectors, n, folder, scratch, lambda done, of: progress(of + done, 2 * of))
    else:
        convert(source, folder / INDEX_FILE, kind, progress=lambda done, of: progress(of + done, 2 * of))


def rescored_recall(
    exact, approximate, vectors: ExactVectors, queries: np.ndarray, topk: int, rescore: int
) -> float:
    """As `recall`, of an index whose candidates are scored again."""
    topk = min(topk, exact.ntotal)
    _, truth = exact.search(queries, topk)
    _, found = approximate.search(queries, min(topk * rescore, exact.ntotal))
    kept = [
        [row for row, _ in vectors.best(query, rows, topk)]
        for query, rows in zip(queries, found, strict=True)
    ]
    return float(np.mean([len(np.intersect1d(t, k)) / topk for t, k in zip(truth, kept, strict=True)]))


def recall(exact, approximate, queries: np.ndarray, topk: int) -> float:
    """Share of the exact `topk` that the approximate index finds among its own `topk`."""
    topk = min(topk, exact.ntotal)
    _, truth = exact.search(queries, topk)
    _, found = approximate.search(queries, topk)
    return float(np.mean([len(np.intersect1d(t, f)) / topk for t, f in zip(truth, found, strict=True)]))


def sample_queries(flat, count: int, seed: int = 1) -> np.ndarray:
    """Unit vectors to measure recall with where no questions are at hand: stored vectors, each turned a third
    towards another one."""
    draw = np.random.default_rng(seed)
    rows = draw.integers(0, flat.ntotal, (min(count, flat.ntotal), 2))
    pairs = np.stack([[flat.reconstruct(int(a)), flat.reconstruct(int(b))] for a, b in rows])
    mixed = pairs[:, 0] + pairs[:, 1] / 2
    return np.ascontiguousarray(
        mixed / np.maximum(np.linalg.norm(mixed, axis=1, keepdims=True), 1e-9), np.float32
    )
