"""Inverted lists (IVF) made in bounded memory, from vectors that need not fit into it, and gone on with after
a kill.

The quantisers learn from a sample. Then each block of vectors becomes a file of its own lists, which is
renamed when it is whole, and at the end the lists of all blocks are merged on disk. At no time more than the
sample or one block is in memory.

Learning again need not give the same bits, and lists of one quantiser mean nothing to another: so what is
half done goes away in one step, and never the quantiser before its lists.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from retriever_service.dense.learning import learn
from retriever_service.dense.lists import plain_type, write_lists
from retriever_service.dense.search import INDEX_FILE, import_faiss, made_of
from services.common.files import move, written_aside

BLOCK_ROWS = 262_144
TRAIN_ROWS_PER_LIST = 64
_LEAST_TRAIN_ROWS = 20_000
_TRAINED = "trained.index"
Vectors = Callable[[int, int], np.ndarray]
"""From the first row and their number to vectors, float32 [number, dimension]."""


def write_inverted(
    made,
    kind: str,
    vectors: Vectors,
    count: int,
    folder: Path,
    scratch: Path,
    progress: Callable[[int, int], None],
    *,
    seed: int = 0,
    block_rows: int = BLOCK_ROWS,
    rows_per_list: int = TRAIN_ROWS_PER_LIST,
) -> None:
    """Write `folder/faiss.index` and its lists (`retriever_service.dense.lists`).

    `made` is an empty index of the type `kind`; `scratch` is a folder for what is half done, which is removed
    at the end. `rows_per_list` vectors a list are learnt from.

    Raises UserError where such an index can't be made of these vectors.
    """
    faiss = import_faiss()
    gone = scratch.with_name(f"{scratch.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    for left in folder.glob(".*.tmp"):
        left.unlink()
    if not scratch.exists() and (folder / INDEX_FILE).is_file():  # the index is what is written last
        return
    scratch.mkdir(exist_ok=True)
    trained = scratch / _TRAINED
    made = plain_type(faiss, made)
    with made_of(kind, f"{count:,} vectors"):
        if not trained.is_file():
            learn(made, _sample(vectors, count, made.nlist * rows_per_list, seed))
            _put(faiss, made, trained)
        blocks = []
        for begin in range(0, count, block_rows):
            size = min(block_rows, count - begin)
            block = scratch / f"{begin:012d}.index"
            blocks.append(block)
            if not block.is_file():
                part = faiss.read_index(str(trained))
                part.add_with_ids(vectors(begin, size), np.arange(begin, begin + size))
                _put(faiss, part, block)
            progress(begin + size, count)
    _merge(faiss, trained, blocks, folder)
    move(scratch, gone)
    shutil.rmtree(gone)


def _sample(vectors: Vectors, count: int, wanted: int, seed: int) -> np.ndarray:
    """Vectors to learn from: runs of neighbours from all over, so that a disk reads them in one sweep."""
    wanted = min(count, max(wanted, _LEAST_TRAIN_ROWS))
    if wanted == count:
        return vectors(0, count)
    run = 16
    starts = np.sort(np.random.default_rng(seed).permutation(count // run)[: -(-wanted // run)]) * run
    return np.concatenate([vectors(int(start), run) for start in starts])


def _put(faiss, index, path: Path) -> None:
    with written_aside(path, durable=True) as aside:
        faiss.write_index(index, str(aside))


def _merge(faiss, trained: Path, blocks: list[Path], folder: Path) -> None:
    # The lists of the blocks are mapped and not read into memory.
    write_lists(faiss, [faiss.read_index(str(block), faiss.IO_FLAG_MMAP) for block in blocks], folder)
    _put(faiss, faiss.read_index(str(trained)), folder / INDEX_FILE)
