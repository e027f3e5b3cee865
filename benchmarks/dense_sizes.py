"""A compressed dense index at a size, from vectors that are made: recall, latency with clients, memory.

    python -m benchmarks.dense_sizes WORK VECTORS DIMENSION [--nprobe 32 64] [--clients 16] [--seconds 20]

Builds `IVF,SQ8` with the vectors beside it in float16, in bounded memory, as `index convert --rescore 10`
does, from `benchmarks.made_vectors`; no float32 copy lies on the disk. Prints a line of JSON per measurement.
Recall@3 is that of 1,000 made questions against all products with the float16 vectors. The server is the real
one, in a process of its own; in place of an encoder it looks the vector of a made question up, so latency is
without encoding. Memory is of that process: its own, and with mapped pages. A build that was killed goes on.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil

from benchmarks.made_vectors import CHUNK, Made
from benchmarks.retriever import machine, tell
from benchmarks.retriever_load.http_load import load, post
from retriever_service.dense.build import make_type
from retriever_service.dense.exact import FILE, write_exact
from retriever_service.dense.inverted import write_inverted
from retriever_service.dense.search import INDEX_FILE, DenseRanker
from retriever_service.http.launch import serve_in_thread
from retriever_service.index_folder.description import IndexInfo
from retriever_service.index_folder.documents import OFFSETS_FILE, TEXT_FILE, Documents, encode_document
from retriever_service.search.search_index import RankedIndex
from retriever_service.settings import ServerSettings

TOPK = 3
RESCORE = 10
KIND = "IVF,SQ8"
QUESTIONS = 1000
BLOCK = 65_536
QUESTIONS_FILE = "questions.npy"


def build(work: Path, count: int, dimension: int) -> dict:
    """The index in `work`, and what it took."""
    made = Made(dimension)
    began, spent = time.perf_counter(), time.process_time()

    def chunk(begin: int, size: int) -> np.ndarray:
        return made.chunk(begin // CHUNK)[:size]

    write_exact(chunk, count, work / FILE, "float16", CHUNK, lambda done: None)
    vectors_seconds = time.perf_counter() - began
    stored = np.memmap(work / FILE, np.float16, "r", shape=(count, dimension))

    def vectors(begin: int, size: int) -> np.ndarray:
        return stored[begin : begin + size].astype(np.float32)

    def told(done: int, of: int) -> None:
        print(f"{done:,} of {of:,} vectors in lists", file=sys.stderr, flush=True)

    empty = make_type(dimension, KIND, count)
    write_inverted(empty, KIND, vectors, count, work, work / "lists", told)
    offsets = np.zeros(count + 1, np.uint64)
    with (work / TEXT_FILE).open("wb") as file:
        for row in range(count):
            file.write(encode_document(str(row), f"made passage {row}") + b"\n")
            offsets[row + 1] = file.tell()
    offsets.tofile(work / OFFSETS_FILE)
    rows = np.sort(np.random.default_rng(3).choice(count, QUESTIONS, replace=False))
    np.save(work / QUESTIONS_FILE, made.questions(stored[rows].astype(np.float32)))
    on_disk = {file.name: file.stat().st_size for file in work.iterdir() if file.is_file()}
    return {
        "vectors": count,
        "dimension": dimension,
        "lists": empty.nlist,
        "seconds": round(time.perf_counter() - began),
        "of_them_vectors": round(vectors_seconds),
        "cpu_seconds": round(time.process_time() - spent),
        "bytes": on_disk,
    }


def truth(work: Path, count: int, dimension: int) -> np.ndarray:
    """Rows of the best TOPK of each question by all products, int64 [QUESTIONS, TOPK]."""
    questions = np.load(work / QUESTIONS_FILE)
    stored = np.memmap(work / FILE, np.float16, "r", shape=(count, dimension))
    scores = np.full((len(questions), TOPK), -np.inf, np.float32)
    rows = np.zeros((len(questions), TOPK), np.int64)
    for begin in range(0, count, BLOCK):
        products = questions @ stored[begin : begin + BLOCK].astype(np.float32).T
        found = np.argpartition(products, -TOPK, axis=1)[:, -TOPK:]
        scores = np.concatenate([scores, np.take_along_axis(products, found, 1)], 1)
        rows = np.concatenate([rows, found + begin], 1)
        kept = np.argsort(-scores, axis=1)[:, :TOPK]
        scores = np.take_along_axis(scores, kept, 1)
        rows = np.take_along_axis(rows, kept, 1)
    return rows


class LookedUp:
    """In place of an encoder: the vector of a made question, by its number."""

    def __init__(self, work: Path) -> None:
        self._vectors = np.load(work / QUESTIONS_FILE)
        self.dimension = self._vectors.shape[1]
        self.settings = SimpleNamespace(model="made questions")

    def queries(self, texts: list[str]) -> np.ndarray:
        return self._vectors[[int(text) if text.isdecimal() else 0 for text in texts]]


def open_made(work: Path, count: int, nprobe: int) -> RankedIndex:
    ranker = DenseRanker(
        work / INDEX_FILE, LookedUp(work), count, nprobe=nprobe, rescore=RESCORE, kind=KIND
    )  # fmt: skip
    info = IndexInfo(backend="dense", corpus="made", passages=count, settings={})
    return RankedIndex(info, Documents(work / TEXT_FILE, work / OFFSETS_FILE), ranker)


def recall(work: Path, count: int, nprobe: int, expected: np.ndarray) -> dict:
    """Recall@TOPK, and the processor time of a question, one at a time."""
    index = open_made(work, count, nprobe)
    kept = []
    spent = []
    for number, rows in enumerate(expected):
        began = time.process_time()
        (found,) = index.ranker.rank([str(number)], TOPK)
        spent.append(1000 * (time.process_time() - began))
        kept.append(len(np.intersect1d(rows, [row for row, _ in found])) / TOPK)
    index.close()
    return {
        "nprobe": nprobe,
        "recall": round(float(np.mean(kept)), 4),
        "cpu_ms": round(float(np.mean(spent)), 2),
    }


def serve(work: Path, count: int, nprobe: int) -> None:
    """Serve it until standard input ends; the address is printed."""
    settings = ServerSettings(index="made", port=0, cache_size=0)
    with serve_in_thread(settings, open_index=lambda: open_made(work, count, nprobe)) as server:
        print(server.url, flush=True)
        sys.stdin.read()


@contextmanager
def served(work: Path, count: int, nprobe: int) -> Iterator[tuple[str, psutil.Process]]:
    """Its address and its process."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.dense_sizes",
        str(work),
        str(count),
        "0",
        "--serve",
        str(nprobe),
    ]
    root = Path(__file__).resolve().parents[1]
    with subprocess.Popen(
        command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), psutil.Process(process.pid)
        finally:
            process.stdin.close()


def loaded(work: Path, count: int, nprobe: int, clients: int, seconds: float) -> dict:
    """Latency and rate over HTTP, and memory after it."""
    requests = [post("/retrieve", {"queries": [str(n)], "topk": TOPK}) for n in range(QUESTIONS)]
    with served(work, count, nprobe) as (url, process):
        load(url, requests, 2, 5)  # so that the pages that questions read are there
        done = load(url, requests, clients, seconds, warm_up=0)
        memory = process.memory_info()
    return {
        "nprobe": nprobe,
        "clients": clients,
        **{name: round(value, 2) for name, value in done.items()},
        "own_mib": round((memory.rss - memory.shared) / 2**20),
        "with_mapped_mib": round(memory.rss / 2**20),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", type=Path)
    parser.add_argument("vectors", type=int)
    parser.add_argument("dimension", type=int)
    parser.add_argument("--nprobe", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        serve(args.work, args.vectors, args.serve)
        return

    args.work.mkdir(parents=True, exist_ok=True)
    tell("machine", {"name": machine()})
    tell("build", build(args.work, args.vectors, args.dimension))
    began = time.perf_counter()
    expected = truth(args.work, args.vectors, args.dimension)
    tell("truth", {"seconds": round(time.perf_counter() - began)})
    for nprobe in args.nprobe:
        tell("recall", recall(args.work, args.vectors, nprobe, expected))
        tell("load", loaded(args.work, args.vectors, nprobe, args.clients, args.seconds))


if __name__ == "__main__":
    main()
