"""Processor time that a rollout worker spends on a turn, the engine left out: templates, tags, tokenizer, and
searches over HTTP.

    python -m benchmarks.rollout.turn_cost --corpus corpus.jsonl [--trajectories 256] [--rounds 5] [--profile]

The engine is a script: each trajectory thinks, searches twice with words of the corpus, reads, and answers,
in tokens that were made before, each call after a pause as if it wrote. Worker, template, tokenizer (a
byte-level BPE of the corpus) and the retriever's service, in a process of its own, are those of a run.
--profile prints the functions that the time goes to.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import io
import json
import pstats
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.machine import machine
from benchmarks.gpu.retriever import served
from benchmarks.gpu_searcher import train_tokenizer
from services.contracts import Question, TrajectoryRequest
from services.rollout.engines.base import GenerateCall, Generation
from services.rollout.worker import worker as worker_module
from services.rollout.worker.worker import RolloutWorker
from services.settings import RolloutSettings

SEARCHES = 2


class Script:
    """An engine whose next action depends on the turn alone."""

    def __init__(self, actions: list[list[list[int]]], pause: float) -> None:
        self._actions = actions
        self._pause = pause
        self._draw = random.Random(0)

    async def generate(self, call: GenerateCall) -> Generation:
        name, _, turn = call.request_id.split(".")[:3]
        await asyncio.sleep(self._draw.uniform(0, self._pause))
        ids = self._actions[int(name.rsplit("-", 1)[1]) % len(self._actions)][int(turn)]
        return Generation(list(ids), [-1.0] * len(ids), "", "stop", 0)

    def check(self) -> None: ...

    async def close(self) -> None: ...


def scripts(corpus: Path, tokenizer: Any, count: int) -> list[list[list[int]]]:
    """For each trajectory its actions as token ids."""
    with corpus.open(encoding="utf-8") as lines:
        words = [json.loads(line)["contents"].split() for line, _ in zip(lines, range(count), strict=False)]

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    return [
        [
            *(
                ids(f"{' '.join(w[n : n + 45])} <search> {' '.join(w[n : n + 6])} </search>")
                for n in range(SEARCHES)
            ),
            ids(f"{' '.join(w[:45])} <answer> {w[0]} </answer>"),
        ]
        for w in words
    ]


async def measure(url: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    tokenizer = train_tokenizer(args.corpus, folder, words=8000, passages=2000)
    engine = Script(scripts(args.corpus, tokenizer, 512), args.pause)

    async def start_engine(*_: Any) -> Script:
        return engine

    worker_module.start_engine = start_engine
    settings = RolloutSettings(template="search_r1", max_turns=4, max_model_tokens=8192)
    worker = RolloutWorker(
        "cost", settings, model_path=str(folder), retriever_url=url, retriever_timeout_seconds=60.0
    )
    await worker.start()
    costs, threads = [], []
    profile = cProfile.Profile()
    for number in range(args.rounds + 1):
        batch = [
            TrajectoryRequest(
                f"{number}-{i}", "g", Question(f"q{i // 8}", f"Who is {i // 8}?", ("x",), "made"), i, 1.0
            )
            for i in range(args.trajectories)
        ]
        last = number == args.rounds
        if args.profile and last:
            profile.enable()
        began, own = time.process_time(), time.thread_time()
        done = await asyncio.gather(*(worker.rollout(request) for request in batch))
        turns = sum(len(t.actions) for t in done)
        assert turns == (SEARCHES + 1) * args.trajectories, turns
        if number and not (args.profile and last):  # the first round opens connections
            costs.append((time.process_time() - began) / turns * 1e6)
            threads.append((time.thread_time() - own) / turns * 1e6)
        profile.disable()
    await worker.close()
    out: dict[str, Any] = {"us_per_turn": costs, "of_the_loop": threads}
    if args.profile:
        text = io.StringIO()
        pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(25)
        out["profile"] = text.getvalue()
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True, help="lines with `contents`")
    parser.add_argument("--trajectories", type=int, default=256, help="at the same time")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.5, help="most seconds that an action takes")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    with served(args.corpus) as url, tempfile.TemporaryDirectory() as folder:
        measured = asyncio.run(measure(url, args, Path(folder)))
    profile = measured.pop("profile", "")
    print(json.dumps(machine() | measured))
    for name, values in measured.items():
        print(f"{name}: {sorted(values)[len(values) // 2]:.0f} ({min(values):.0f} to {max(values):.0f}) us")
    print(profile)


if __name__ == "__main__":
    main()
