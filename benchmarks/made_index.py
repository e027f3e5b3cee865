"""The files of a dense index of made vectors, written by several processes.

Vectors of `benchmarks.made_vectors` in float16, and a passage of fixed width to each, so that every chunk has
its place from the beginning. Killed, it goes on with the first chunk that is not known to be whole.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path

import numpy as np

from benchmarks.made_vectors import CHUNK, Made
from retriever_service.dense.exact import FILE
from retriever_service.index_folder.documents import OFFSETS_FILE, TEXT_FILE, encode_document
from services.common.files import hints, write_json
from services.common.processes.parent import when_parent_ends

BLOCK = 65_536
_DONE_FILE = "made.json"
_NOTED = 50
"""Chunks between two notes of how far it came."""
_made: list[Made] = []
"""In a worker: what makes its vectors."""


@contextmanager
def workers(processes: int, dimension: int) -> Iterator[ProcessPoolExecutor]:
    """Processes with one thread each. Started anew and not forked: OpenMP does not live on in a fork."""
    before = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    os.environ.update(dict.fromkeys(before, "1"))
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, _prepared, (dimension,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _prepared(dimension: int) -> None:
    when_parent_ends(lambda: os._exit(1))
    _made.append(Made(dimension))


def _passages(begin: int, count: int) -> bytes:
    return b"".join(
        encode_document(f"{row:09d}", f"made passage {row:09d}") + b"\n"
        for row in range(begin, begin + count)
    )


WIDTH = len(_passages(0, 1))
"""Bytes of a passage."""


def _put(path: Path, content: bytes, place: int) -> None:
    file = os.open(path, os.O_WRONLY)
    try:
        while content:
            written = os.pwrite(file, content, place)
            content = content[written:]
            place += written
    finally:
        os.close(file)


def _write_chunk(work: Path, count: int, dimension: int, number: int) -> float:
    """Returns the processor time that it took."""
    began = time.process_time()
    begin = number * CHUNK
    size = min(CHUNK, count - begin)
    _put(work / FILE, _made[0].chunk(number)[:size].astype(np.float16).tobytes(), 2 * dimension * begin)
    _put(work / TEXT_FILE, _passages(begin, size), WIDTH * begin)
    return time.process_time() - began


def write_files(
    work: Path, count: int, dimension: int, processes: int, progress: Callable[[int], None]
) -> float:
    """Write vectors and passages. `progress` is told the vectors that are whole. Returns processor
    seconds."""
    key = {"vectors": count, "dimension": dimension}
    done = hints(work / _DONE_FILE)
    first = done.get("chunks", 0) if {name: done.get(name) for name in key} == key else 0
    chunks = -(-count // CHUNK)
    for name, width in ((FILE, 2 * dimension), (TEXT_FILE, WIDTH)):
        (work / name).touch()
        os.truncate(work / name, width * count)
    spent = 0.0
    if first < chunks:
        with workers(processes, dimension) as pool:
            numbers = range(first, chunks)
            given = (repeat(work), repeat(count), repeat(dimension), numbers)
            for number, seconds in zip(numbers, pool.map(_write_chunk, *given), strict=True):
                spent += seconds
                if number % _NOTED == _NOTED - 1 or number == chunks - 1:
                    write_json(work / _DONE_FILE, key | {"chunks": number + 1})
                    progress(min(count, (number + 1) * CHUNK))
    write_offsets(work, count)
    return spent


def write_offsets(work: Path, count: int) -> None:
    """The places of `count` passages."""
    (WIDTH * np.arange(count + 1, dtype=np.uint64)).tofile(work / OFFSETS_FILE)


def cut(work: Path, count: int, dimension: int) -> None:
    """Leave the first `count` vectors and passages, for good: another call of `write_files` begins anew."""
    (work / _DONE_FILE).unlink()
    os.truncate(work / FILE, 2 * dimension * count)
    os.truncate(work / TEXT_FILE, WIDTH * count)
    write_offsets(work, count)


def _best_of_block(
    work: Path, questions: Path, topk: int, begin: int, end: int, dimension: int
) -> tuple[np.ndarray, np.ndarray]:
    stored = np.memmap(work / FILE, np.float16, "r", 2 * dimension * begin, (end - begin, dimension))
    products = np.load(questions) @ stored.astype(np.float32).T
    found = np.argpartition(products, -min(topk, end - begin), axis=1)[:, -topk:]
    return best_of(np.take_along_axis(products, found, 1), found + begin, topk)


def best_of(scores: np.ndarray, rows: np.ndarray, topk: int) -> tuple[np.ndarray, np.ndarray]:
    """The best of each line, best first."""
    kept = np.argsort(-scores, axis=1)[:, :topk]
    return np.take_along_axis(scores, kept, 1), np.take_along_axis(rows, kept, 1)


def exact_best(
    work: Path,
    questions: Path,
    count: int,
    dimension: int,
    topk: int,
    processes: int,
    progress: Callable[[int], None],
) -> np.ndarray:
    """Rows of the best `topk` of each question by float32 products with all vectors, int64 [questions, topk].
    questions: a file of float32 [questions, dimension]."""
    begins = [*range(0, count, BLOCK)]
    ends = [min(count, begin + BLOCK) for begin in begins]
    asked = len(np.load(questions, "r"))
    scores = np.full((asked, topk), -np.inf, np.float32)
    rows = np.zeros((asked, topk), np.int64)
    with workers(processes, dimension) as pool:
        given = (repeat(work), repeat(questions), repeat(topk), begins, ends, repeat(dimension))
        for end, (own_scores, own_rows) in zip(ends, pool.map(_best_of_block, *given), strict=True):
            scores, rows = best_of(
                np.concatenate([scores, own_scores], 1), np.concatenate([rows, own_rows], 1), topk
            )
            progress(end)
    return rows
