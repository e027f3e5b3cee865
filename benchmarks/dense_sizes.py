"""A compressed dense index at a size, from vectors that are made: recall, latency with clients, memory.

    python -m benchmarks.dense_sizes WORK VECTORS DIMENSION [--type IVF,SQ8] [--nprobe 32 64] [--clients 16]
        [--processes N] [--server-threads N] [--budget SECONDS]

Makes float16 vectors with a seed in several processes, and from them an index with these vectors beside it,
in bounded memory, as `index convert --rescore 10` does; no float32 copy lies on the disk. Prints a line of
JSON per measurement, and on standard error how far it is. Recall@3 is that of made questions against all
products with the float16 vectors. The server is the real one, in a process of its own; in place of an encoder
it looks the vector of a made question up, so latency is without encoding. Memory is of that process: its own,
and with mapped pages. A build that was killed goes on.

`IVF_HNSW32,SQ8` finds the list of a vector by a graph over the lists: of many lists the build is then several
times as fast. With `--budget` the quantiser learns from fewer vectors where time is short, the index has as
many vectors as fit (the measurements keep their share), and a measurement that would not fit is left out; a
line with "skipped" or "cut" says so.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil

from benchmarks.made_index import cut, exact_best, write_files
from benchmarks.made_vectors import Made as MadeVectors
from benchmarks.retriever import machine, tell
from benchmarks.retriever_load.http_load import load, post
from retriever_service.dense.build import make_type
from retriever_service.dense.exact import FILE
from retriever_service.dense.inverted import BLOCK_ROWS, TRAIN_ROWS_PER_LIST, write_inverted
from retriever_service.dense.learning import LINKS, finds_lists_by_a_graph
from retriever_service.dense.search import INDEX_FILE, DenseRanker, import_faiss
from retriever_service.http.launch import serve_in_thread
from retriever_service.index_folder.description import IndexInfo
from retriever_service.index_folder.documents import OFFSETS_FILE, TEXT_FILE, Documents
from retriever_service.search.search_index import RankedIndex
from retriever_service.settings import ServerSettings
from services.common.files import link_or_copy

TOPK = 3
KIND = "IVF,SQ8"
QUESTIONS = 1000
QUESTIONS_FILE = "questions.npy"
LEAST_PER_LIST = 16
"""Vectors a list that a quantiser learns from at least, however short the time."""
ITERATIONS = 10
"""Of FAISS's k-means for inverted lists."""
FARTHER = 1.25
"""Times as long, where a graph has twice as many lists."""
LEARNING_SHARE = 0.35
"""Of the time that is left, for the quantiser to learn in."""
START_SECONDS = 15
"""For a server to start and be warmed, beside the load itself."""
ASKED_SECONDS = 0.02
"""Of a question, one at a time."""
PRODUCTS_PER_CORE = 1.5e10
"""Additions and multiplications of a core per second, where all cores compare questions with vectors."""
COPIED_PER_SECOND = 4e8
"""Bytes."""


class Budget:
    """Seconds of the clock for the whole run; without any, all fits."""

    def __init__(self, seconds: float = math.inf) -> None:
        self.began = time.perf_counter()
        self._seconds = seconds

    def left(self) -> float:
        return self._seconds - (time.perf_counter() - self.began)

    def fits(self, what: str, needed: float) -> bool:
        """Whether there is time for it. Says so where there is not."""
        if needed <= self.left():
            return True
        tell("skipped", {"stage": what, "needs_seconds": round(needed), "left": round(self.left())})
        return False


class _OutOfTime(Exception):
    """With the number of vectors that are in lists."""


def products_per_second(dimension: int, threads: int) -> float:
    """Additions and multiplications of FAISS's k-means with so many threads, which are set."""
    faiss = import_faiss()
    faiss.omp_set_num_threads(threads)
    draw = np.random.default_rng(0)
    lists = faiss.IndexFlatL2(dimension)
    lists.add(draw.random((4096, dimension), np.float32))
    asked = draw.random((8192, dimension), np.float32)
    lists.search(asked, 1)
    began = time.perf_counter()
    lists.search(asked, 1)
    return 2 * len(asked) * lists.ntotal * dimension / (time.perf_counter() - began)


def progress(what: str) -> Callable[[int, int], None]:
    """Tells how far it is on standard error."""
    began = time.perf_counter()

    def note(done: int, of: int) -> None:
        passed = time.perf_counter() - began
        left = passed / done * (of - done)
        text = f"{passed:.0f} s: {done:,} of {of:,} {what}, {left:.0f} s left"
        print(text, file=sys.stderr, flush=True)

    return note


@dataclass(frozen=True)
class Made:
    """An index of made vectors."""

    folder: Path
    kind: str
    count: int
    dimension: int
    rescore: int = 10

    def open(self, nprobe: int) -> RankedIndex:
        ranker = DenseRanker(
            self.folder / INDEX_FILE, LookedUp(self.folder), self.count, nprobe=nprobe, rescore=self.rescore,
            kind=self.kind,
        )  # fmt: skip
        info = IndexInfo(backend="dense", corpus="made", passages=self.count, settings={})
        documents = Documents(self.folder.parent / TEXT_FILE, self.folder.parent / OFFSETS_FILE)
        return RankedIndex(info, documents, ranker)


def build(
    work: Path, count: int, dimension: int, kind: str = KIND, *, questions: int = QUESTIONS,
    processes: int = 1, threads: int = 1, budget: Budget | None = None, kept: float = 0.0,
) -> tuple[Made, dict]:  # fmt: skip
    """An index in `work`, and what it took. kept: seconds of the budget for what comes after it."""
    budget = budget or Budget()
    began, spent = time.perf_counter(), time.process_time()
    note = progress("vectors made")
    of_workers = write_files(work, count, dimension, processes, lambda done: note(done, count))
    vectors_seconds = time.perf_counter() - began
    folder = work / kind.replace(",", "_")
    folder.mkdir(exist_ok=True)
    link_or_copy(work / FILE, folder / FILE)
    stored = np.memmap(folder / FILE, np.float16, "r", shape=(count, dimension))
    empty = make_type(dimension, kind, count)
    per_list = _learnt_from(empty, threads, budget.left() - kept)
    tell("lists", {"lists": empty.nlist, "learn_from_per_list": per_list})
    lists_began = time.perf_counter()
    learnt = _write_lists(empty, kind, stored, count, folder, per_list, budget, kept)
    if learnt.vectors < count:
        tell("cut", {"asked": count, "vectors": learnt.vectors, "why": "no time for more"})
        count = learnt.vectors
        del stored
        cut(work, count, dimension)
        stored = np.memmap(folder / FILE, np.float16, "r", shape=(count, dimension))
        _write_lists(empty, kind, stored, count, folder, per_list, Budget(), 0.0)
    rows = np.sort(np.random.default_rng(3).choice(count, questions, replace=False))
    asked = MadeVectors(dimension).questions(stored[rows].astype(np.float32))
    np.save(folder / QUESTIONS_FILE, asked)
    took = {
        "type": kind,
        "vectors": count,
        "dimension": dimension,
        "lists": empty.nlist,
        "seconds": round(time.perf_counter() - began),
        "of_them_vectors": round(vectors_seconds),
        "of_them_learning": round(learnt.first_block - lists_began),
        "cpu_seconds": round(time.process_time() - spent + of_workers),
        "processes": processes,
        "threads": threads,
        "bytes": {
            file.name: file.stat().st_size
            for place in (work, folder)
            for file in place.iterdir()
            if file.is_file()
        },
    }
    return Made(folder, kind, count, dimension), took


def lookups_per_second(made, threads: int) -> float:
    """Vectors whose list a graph over the lists of an index finds with so many threads, which are set. The
    graph is of fewer lists where there are many; one of all has a longer way, and its vectors in no cache."""
    faiss = import_faiss()
    faiss.omp_set_num_threads(threads)
    draw = np.random.default_rng(0)
    lists = min(made.nlist, 4096)
    graph = faiss.IndexHNSWFlat(made.d, LINKS, faiss.METRIC_INNER_PRODUCT)
    graph.add(draw.random((lists, made.d), np.float32))
    asked = draw.random((8192, made.d), np.float32)
    began = time.perf_counter()
    graph.search(asked, 1)
    return len(asked) / (time.perf_counter() - began) / FARTHER ** math.log2(made.nlist / lists)


def _learnt_from(made, threads: int, left: float) -> int:
    """Vectors per list that the quantiser learns from: as a conversion's, fewer where time is short."""
    if math.isinf(left):
        return TRAIN_ROWS_PER_LIST
    if finds_lists_by_a_graph(made):
        rate = lookups_per_second(made, threads)
    else:
        rate = products_per_second(made.d, threads) / (2 * made.nlist * made.d)
    per_list = LEARNING_SHARE * left * rate / (ITERATIONS * made.nlist)
    return max(LEAST_PER_LIST, min(TRAIN_ROWS_PER_LIST, int(per_list)))


@dataclass
class _Lists:
    vectors: int = 0
    """In lists."""
    first_block: float = 0.0
    """When the first block began; the quantiser had learnt."""


def _write_lists(
    empty, kind: str, stored: np.ndarray, count: int, folder: Path, per_list: int, budget: Budget, kept: float
) -> _Lists:
    """Write the lists, or those blocks of them that there is time for: then the index is not written yet."""
    done = _Lists()
    note = progress("vectors in lists")
    left = [budget.left()]

    def vectors(begin: int, size: int) -> np.ndarray:
        if begin == 0 and size == min(BLOCK_ROWS, count):
            done.first_block = time.perf_counter()
        return stored[begin : begin + size].astype(np.float32)

    def added(vectors_done: int, of: int) -> None:
        note(vectors_done, of)
        left.append(budget.left())
        done.vectors = vectors_done
        # The lists of all blocks are copied into one file at the end.
        copying = vectors_done * (empty.code_size + 8) / COPIED_PER_SECOND
        block = left[-2] - left[-1]
        # The quantiser learnt before the first block ended.
        if vectors_done < of and len(left) > 2 and left[-1] - kept < copying + block:
            raise _OutOfTime

    with suppress(_OutOfTime):
        write_inverted(empty, kind, vectors, count, folder, folder / "lists", added, rows_per_list=per_list)
        done.vectors = count
    return done


def truth(made: Made, processes: int = 1, budget: Budget | None = None) -> np.ndarray | None:
    """Rows of the best TOPK of each question by all products, int64 [questions, TOPK]; None where the time
    ends before."""
    budget = budget or Budget()
    note = progress("vectors compared")

    def compared(done: int) -> None:
        note(done, made.count)
        if budget.left() < 0:
            raise _OutOfTime

    with suppress(_OutOfTime):
        return exact_best(
            made.folder, made.folder / QUESTIONS_FILE, made.count, made.dimension, TOPK, processes, compared
        )
    return None


class LookedUp:
    """In place of an encoder: the vector of a made question, by its number."""

    def __init__(self, folder: Path) -> None:
        self._vectors = np.load(folder / QUESTIONS_FILE)
        self.dimension = self._vectors.shape[1]
        self.settings = SimpleNamespace(model="made questions")

    def queries(self, texts: list[str]) -> np.ndarray:
        return self._vectors[[int(text) if text.isdecimal() else 0 for text in texts]]


def recall(made: Made, nprobe: int, expected: np.ndarray) -> dict:
    """Recall@TOPK, and the processor time of a question, one at a time."""
    index = made.open(nprobe)
    kept = []
    spent = []
    for number, rows in enumerate(expected):
        began = time.process_time()
        (found,) = index.ranker.rank([str(number)], TOPK)
        spent.append(1000 * (time.process_time() - began))
        kept.append(len(np.intersect1d(rows, [row for row, _ in found])) / TOPK)
    index.close()
    return {
        "type": made.kind,
        "rescore": made.rescore,
        "nprobe": nprobe,
        "recall": round(float(np.mean(kept)), 4),
        "cpu_ms": round(float(np.mean(spent)), 2),
    }


def serve(made: Made, nprobe: int) -> None:
    """Serve it until standard input ends; the address is printed."""
    settings = ServerSettings(index="made", port=0, cache_size=0)
    with serve_in_thread(settings, open_index=lambda: made.open(nprobe)) as server:
        print(server.url, flush=True)
        sys.stdin.read()


@contextmanager
def served(made: Made, nprobe: int, threads: int) -> Iterator[tuple[str, psutil.Process]]:
    """Its address and its process."""
    command = [sys.executable, "-m", "benchmarks.dense_sizes", str(made.folder.parent), str(made.count)]
    command += [str(made.dimension), "--type", made.kind, "--rescore", str(made.rescore)]
    command += ["--serve", str(nprobe)]
    root = Path(__file__).resolve().parents[1]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    with subprocess.Popen(
        command, cwd=root, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), psutil.Process(process.pid)
        finally:
            process.stdin.close()


def loaded(made: Made, nprobe: int, threads: int, clients: int, seconds: float) -> dict:
    """Latency and rate over HTTP, and memory after it."""
    asked = len(np.load(made.folder / QUESTIONS_FILE, "r"))
    requests = [post("/retrieve", {"queries": [str(n)], "topk": TOPK}) for n in range(asked)]
    with served(made, nprobe, threads) as (url, process):
        load(url, requests, 2, 5)  # so that the pages that questions read are there
        done = load(url, requests, clients, seconds, warm_up=0)
        memory = process.memory_info()
    return {
        "type": made.kind,
        "rescore": made.rescore,
        "nprobe": nprobe,
        "server_threads": threads,
        "clients": clients,
        **{name: round(value, 2) for name, value in done.items()},
        "own_mib": round((memory.rss - memory.shared) / 2**20),
        "with_mapped_mib": round(memory.rss / 2**20),
    }


def measure(made: Made, args: argparse.Namespace, budget: Budget) -> None:
    """Load and recall at each number of lists, as far as there is time."""
    for nprobe in args.nprobe:
        for threads in args.server_threads:
            what = f"load of {nprobe} lists, {threads} threads"
            if budget.fits(what, args.seconds + START_SECONDS):
                tell("load", loaded(made, nprobe, threads, args.clients, args.seconds))
    asking = ASKED_SECONDS * args.questions * len(args.nprobe)
    if not budget.fits("recall", comparing_seconds(args, made.count) + asking):
        return
    began = time.perf_counter()
    expected = truth(made, args.processes, budget)
    if expected is None:
        tell("skipped", {"stage": "recall", "why": "its comparison with all vectors took all the time"})
        return
    tell("truth", {"questions": len(expected), "seconds": round(time.perf_counter() - began)})
    for nprobe in args.nprobe:
        tell("recall", recall(made, nprobe, expected))


def comparing_seconds(args: argparse.Namespace, count: int) -> float:
    """For the comparison of all questions with all vectors; an estimate."""
    return START_SECONDS + 2 * args.questions * count * args.dimension / args.processes / PRODUCTS_PER_CORE


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", type=Path)
    parser.add_argument("vectors", type=int)
    parser.add_argument("dimension", type=int)
    parser.add_argument("--type", nargs="+", default=[KIND], help="one or more, of the same vectors")
    parser.add_argument(
        "--rescore", type=int, default=10, help="candidates scored again, per passage asked for"
    )
    parser.add_argument("--nprobe", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=20, help="of a load")
    parser.add_argument("--questions", type=int, default=QUESTIONS)
    parser.add_argument(
        "--processes", type=int, default=cores, help="that make vectors, and threads of FAISS"
    )
    parser.add_argument("--server-threads", type=int, nargs="+", default=[2])
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds for all of it")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        (kind,) = args.type
        folder = args.work / kind.replace(",", "_")
        serve(Made(folder, kind, args.vectors, args.dimension, args.rescore), args.serve)
        return

    budget = Budget(args.budget)
    args.work.mkdir(parents=True, exist_ok=True)
    tell("machine", {"name": machine(), "cores": cores})
    count = args.vectors
    for kind in args.type:
        kept = comparing_seconds(args, count) + ASKED_SECONDS * args.questions * len(args.nprobe)
        kept += len(args.nprobe) * len(args.server_threads) * (args.seconds + START_SECONDS)
        made, took = build(
            args.work, count, args.dimension, kind, questions=args.questions, processes=args.processes,
            threads=args.processes, budget=budget, kept=kept,
        )  # fmt: skip
        count = made.count
        tell("build", took)
        measure(replace(made, rescore=args.rescore), args, budget)
    tell("done", {"seconds": round(time.perf_counter() - budget.began)})


if __name__ == "__main__":
    main()
