"""Exact dense search on one card by plain PyTorch, checked against the CPU in the same run.

    python -m benchmarks.gpu.exact [--vectors 21000000] [--dimension 768] [--dtype float16 int8] [--rate 5000]

Vectors are made (benchmarks.made_vectors): the first CHUNK_LIMIT chunks are different ones, then they come
again, each time turned by other signs, so that making them takes seconds and no two rows are equal. The top 3
of some questions are compared with a float32 product on the CPU over all vectors, which is made once for all
number types. Prints a line of JSON for each of them, and exits with status 1 where the recall of one is below
`--recall` (1.0), or none answers `--rate` questions per second.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.made_vectors import CHUNK, Made
from retriever_service.dense.torch_exact import TorchExact

CHUNK_LIMIT = 50
TOPK = 3
BATCH = 256
DTYPES = ["float16", "int8"]


class Repeated:
    """Made vectors [n, d], float16, made again whenever a slice is read. No file, and little memory."""

    def __init__(self, count: int, dimension: int, seed: int = 0) -> None:
        made = Made(dimension, seed)
        self._chunks = [made.chunk(i).astype(np.float16) for i in range(min(CHUNK_LIMIT, -(-count // CHUNK)))]
        self._signs = np.random.default_rng([seed, 3])
        turns = -(-count // (CHUNK * len(self._chunks)))
        signs = self._signs.integers(0, 2, (turns, dimension)) * 2 - 1
        signs[0] = 1
        # The sign bit of a float16: numpy multiplies float16 in software, and 21 million rows took minutes.
        self._turns = np.where(signs < 0, np.uint16(0x8000), np.uint16(0))
        self.shape = (count, dimension)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
        if isinstance(rows, slice):
            begin, end, _ = rows.indices(len(self))
            first, last = begin // CHUNK, -(-end // CHUNK)
            parts = [self._chunk(number) for number in range(first, last)]
            return np.concatenate(parts)[begin - first * CHUNK : end - first * CHUNK]
        return np.stack([self._chunk(int(row) // CHUNK, int(row) % CHUNK) for row in rows])

    def _chunk(self, number: int, row: int | slice = slice(None)) -> np.ndarray:
        turn, at = divmod(number, len(self._chunks))
        turned = self._chunks[at][row].view(np.uint16) ^ self._turns[turn]
        return turned.view(np.float16)


def exact_rows(vectors: Repeated, questions: np.ndarray, topk: int) -> np.ndarray:
    """Rows of the best by float32 products on the CPU, [questions, topk], best first."""
    asked = torch.from_numpy(questions)
    best = torch.empty((len(questions), 0))
    rows = torch.empty((len(questions), 0), dtype=torch.int64)
    for begin in range(0, len(vectors), 10 * CHUNK):
        # PyTorch widens float16 by vector instructions and all cores; numpy took minutes of one.
        block = torch.from_numpy(vectors[begin : begin + 10 * CHUNK]).float()
        found, at = (asked @ block.T).topk(min(topk, len(block)), dim=1)
        best, kept = torch.cat([best, found], 1).topk(topk, dim=1)
        rows = torch.cat([rows, at + begin], 1).gather(1, kept)
    return rows.numpy()


def measured(args: argparse.Namespace) -> Iterator[dict]:
    """Build, check and time each number type."""
    vectors = Repeated(args.vectors, args.dimension)
    draw = np.random.default_rng(5)
    sources = np.sort(draw.integers(0, len(vectors), args.checked))
    questions = Made(args.dimension).questions(vectors[sources].astype(np.float32))
    truth = exact_rows(vectors, questions, TOPK)
    for dtype in args.dtype:
        yield {
            "vectors": args.vectors,
            "dimension": args.dimension,
            "dtype": dtype,
            "device": args.device,
            "checked": args.checked,
            "batch": args.batch,
        } | of_type(vectors, dtype, questions, truth, args)


def of_type(
    vectors: Repeated, dtype: str, questions: np.ndarray, truth: np.ndarray, args: argparse.Namespace
) -> dict:
    """One number type. Its vectors leave the card with the function, before those of the next come."""
    begun = time.perf_counter()
    index = TorchExact(vectors, device=args.device, dtype=dtype)
    loaded = time.perf_counter() - begun
    _, found = index.search(questions, TOPK)
    recall = float(
        np.mean([len({*a} & {*b}) / TOPK for a, b in zip(truth.tolist(), found.tolist(), strict=True)])
    )
    batch = np.resize(questions, (args.batch, args.dimension))
    index.search(batch, TOPK)
    seconds = []
    for _ in range(args.rounds):
        begun = time.perf_counter()
        index.search(batch, TOPK)  # ends with a copy to the host, so nothing is left running
        seconds.append(time.perf_counter() - begun)
    return {
        "load_seconds": round(loaded, 1),
        "recall_at_3": round(recall, 5),
        "queries_per_second": round(args.batch / float(np.median(seconds)), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vectors", type=int, default=21_000_000)
    parser.add_argument("--dimension", type=int, default=768)
    parser.add_argument("--dtype", nargs="+", choices=("float32", "float16", "int8"), default=DTYPES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--checked", type=int, default=64)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--recall", type=float, default=1.0, help="that each number type must have")
    parser.add_argument("--rate", type=float, default=0.0, help="questions/s that the fastest must answer")
    args = parser.parse_args()
    found = []
    for one in measured(args):
        print(json.dumps(one), flush=True)
        found.append(one)
    exact = all(one["recall_at_3"] >= args.recall for one in found)
    if not exact or max(one["queries_per_second"] for one in found) < args.rate:
        sys.exit(1)


if __name__ == "__main__":
    main()
