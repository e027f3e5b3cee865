"""Processor time that a rollout worker's process spends on a search: each in a request of its own, against
searches that come together in one request.

    python -m benchmarks.rollout.search_cost --corpus corpus.jsonl [--searches 2048]
        [--at-once 64] [--pairs 10]

The retriever service has a process of its own, as in a run; queries are the passages' first words. So many
trajectories search at the same time, pause as if they wrote, and search again. The two ways take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.machine import machine
from benchmarks.gpu.retriever import served
from retriever_service.client import RetrieverClient
from services.rollout.worker.worker import JOIN_SECONDS

WAYS = {"alone": 0.0, "together": JOIN_SECONDS}


def queries_of(corpus: Path, count: int) -> list[str]:
    with corpus.open(encoding="utf-8") as lines:
        texts = [json.loads(line)["contents"] for line, _ in zip(lines, range(count), strict=False)]
    return [" ".join(text.split()[:8]) for text in texts]


async def round_of(client: RetrieverClient, queries: list[str], args: argparse.Namespace, seed: int) -> float:
    """Microseconds of processor time per search."""
    draw = random.Random(seed)
    each = args.searches // args.at_once

    async def trajectory(pauses: list[float], mine: list[str]) -> None:
        for pause, query in zip(pauses, mine, strict=True):
            await asyncio.sleep(pause)
            [hits] = await client.retrieve([query], 3)
            assert hits, query

    work = [
        ([draw.uniform(0, args.pause) for _ in range(each)], draw.choices(queries, k=each))
        for _ in range(args.at_once)
    ]
    began = time.process_time()
    await asyncio.gather(*(trajectory(*one) for one in work))
    return (time.process_time() - began) / (each * args.at_once) * 1e6


async def measure(url: str, args: argparse.Namespace) -> dict[str, Any]:
    queries = queries_of(args.corpus, 5000)
    clients = {way: RetrieverClient(url, join_seconds=seconds) for way, seconds in WAYS.items()}
    costs: dict[str, list[float]] = {way: [] for way in WAYS}
    for client in clients.values():
        await client.wait_ready(60)
        await round_of(client, queries, args, seed=0)  # opens connections, and shows that it answers well
    for pair in range(args.pairs):
        for way in WAYS:
            costs[way].append(await round_of(clients[way], queries, args, seed=pair))
    for client in clients.values():
        await client.aclose()
    ratios = [a / b for a, b in zip(costs["alone"], costs["together"], strict=True)]
    return {"us": costs, "ratio": ratios}


def spread(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True, help="lines with `contents`")
    parser.add_argument("--searches", type=int, default=2048, help="in each round")
    parser.add_argument("--at-once", type=int, default=64, help="trajectories that search")
    parser.add_argument("--pause", type=float, default=0.1, help="most seconds between two searches of one")
    parser.add_argument("--pairs", type=int, default=10)
    args = parser.parse_args()
    with served(args.corpus) as url:
        measured = asyncio.run(measure(url, args))
    print(json.dumps(machine() | measured))
    for way in WAYS:
        print(f"{way:10} {spread(measured['us'][way], 0)} us of processor time per search")
    print(f"ratio      {spread(measured['ratio'], 2)}")


if __name__ == "__main__":
    main()
