"""Candidates that are scored again where their vectors are in no memory: asked of the disk at once, or waited
for in turn.

    python -m benchmarks.cold_candidates INDEX/dense/exact.vectors DIMENSION [--candidates 210] [--times 50]

Takes the float16 vectors that `index convert --rescore` keeps beside an index. Their pages are dropped from
the system's cache (of this file alone) before each of ten rounds, which alternate between both ways; every
search has candidates from all over the file, drawn with a seed. Prints a line of JSON per way: the median and
the largest time of a search, and its processor time, in milliseconds.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import numpy as np

from benchmarks.retriever import machine, tell
from retriever_service.dense.exact import ExactVectors

ROUNDS = 10


class InTurn(ExactVectors):
    """Leaves it to the kernel to read what is touched."""

    def _ask_for(self, rows: list[int]) -> None:
        pass


WAYS = {"at once": ExactVectors, "in turn": InTurn}


def forget(path: Path) -> None:
    """Drop the pages of a file from the system's cache. No process may have it mapped."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


def spent(way: str, path: Path, dimension: int, count: int, draws: list[np.ndarray]) -> list[list[float]]:
    """Milliseconds of the clock and of the processor, per search."""
    forget(path)
    vectors = WAYS[way](path, "float16", dimension, count)
    query = np.ones(dimension, np.float32)
    found = []
    for rows in draws:
        began, busy = time.perf_counter(), time.process_time()
        vectors.best(query, rows, 3)
        found.append([1000 * (time.perf_counter() - began), 1000 * (time.process_time() - busy)])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("vectors", type=Path)
    parser.add_argument("dimension", type=int)
    parser.add_argument("--candidates", type=int, default=210, help="per search")
    parser.add_argument("--times", type=int, default=50, help="searches per way and round")
    args = parser.parse_args()
    count = args.vectors.stat().st_size // (2 * args.dimension)
    draw = np.random.default_rng(0)
    tell("machine", {"name": machine(), "vectors": count, "dimension": args.dimension})
    found: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for number in range(ROUNDS):
        draws = [draw.integers(0, count, args.candidates) for _ in range(args.times)]
        way = list(WAYS)[number % 2]
        found[way] += spent(way, args.vectors, args.dimension, count, draws)
    for way, times in found.items():
        clock, busy = np.array(times).T
        tell(
            way,
            {
                "candidates": args.candidates,
                "searches": len(clock),
                "ms": round(float(np.median(clock)), 1),
                "most_ms": round(float(clock.max()), 1),
                "cpu_ms": round(float(np.median(busy)), 2),
            },
        )


if __name__ == "__main__":
    main()
