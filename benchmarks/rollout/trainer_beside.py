"""Training beside the retriever on one machine: the share of a step that is spent waiting for search.

    python -m benchmarks.rollout.trainer_beside INDEX [INDEX ...] --corpus corpus.jsonl
        --questions train.jsonl --out DIR [--trajectories 256] [--steps 3] [--workers 2]

Each index is served in a process of its own, without a result cache, and `unspiral train` runs against it:
Ray, rollout pool, agent loop, vLLM, learner, HTTP. A tiny model that knows nothing stands in for a trained
one (`benchmarks.gpu_searcher`): it thinks for a random number of tokens, then searches for one of the
questions, drawn at random, or answers. The reward is a coin, so that there is an update.

Prints a line of JSON per step, from the run's own spans and metrics. `of_trajectory`: seconds in searches
over those of all trajectories. `some_wait`: share of the step in which one trajectory or more waits for a
search. `all_wait`: share in which no trajectory writes, and one or more wait: what search alone costs;
`all_wait_of_rollout` is the same over the time from the first trajectory asked for to the last received.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from ruamel.yaml import YAML

from benchmarks.gpu.machine import machine
from benchmarks.gpu_searcher import make_searcher
from benchmarks.retriever import all_cpu_seconds, read_questions, server
from services.common.files import json_lines
from services.contracts import Trajectory
from trainer.loop.run.spans import StepSpans, read_spans

ROOT = Path(__file__).resolve().parents[2]
Intervals = list[tuple[float, float]]


def coin(trajectory: Trajectory) -> float:
    """A reward of 0 or 1 by the trajectory's name."""
    return float(hashlib.blake2b(trajectory.uid.encode(), digest_size=1).digest()[0] & 1)


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """The intervals in order, those that overlap as one."""
    out: Intervals = []
    for begin, end in sorted(intervals):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((begin, end))
    return out


def length(intervals: Intervals) -> float:
    return sum(end - begin for begin, end in intervals)


def waits(spans: StepSpans) -> dict[str, float]:
    """What a step's trajectories waited for search. Driver and workers share a clock: one machine."""
    step = spans.ended - spans.began
    of_kind: dict[str, Intervals] = {"generate": [], "search": []}
    whole = 0.0
    for trajectory in spans.trajectories:
        whole += trajectory.spans[0].seconds
        for span in trajectory.spans[1:]:
            of_kind[span.name].append((span.began, span.began + span.seconds))
    searches = [end - begin for begin, end in of_kind["search"]]
    rollout = max(t.received for t in spans.trajectories) - min(t.asked for t in spans.trajectories)
    writing = union(of_kind["generate"])
    both = union(of_kind["generate"] + of_kind["search"])
    return {
        "trajectories": len(spans.trajectories),
        "searches": len(searches),
        "search_p50_ms": 1000 * float(np.median(searches)) if searches else 0.0,
        "search_p99_ms": 1000 * float(np.quantile(searches, 0.99)) if searches else 0.0,
        "of_trajectory": sum(searches) / whole,
        "some_wait": length(union(of_kind["search"])) / step,
        "all_wait": (length(both) - length(writing)) / step,
        "all_wait_of_rollout": (length(both) - length(writing)) / rollout,
    }


def configuration(args: argparse.Namespace, model: Path, url: str, name: str) -> dict[str, Any]:
    """The run: float32 on a CPU; `--set` changes it."""
    return {
        "run": {"name": name, "dir": str(args.out)},
        "seed": 0,
        "model": {"path": str(model)},
        "data": {"train": str(args.questions.resolve())},
        "retriever": {"url": url},
        "reward": {"kind": f"{__spec__.name if __spec__ else __name__}:coin"},
        "rollout": {
            "template": "search_r1",
            "dtype": "float32",
            "prompts_per_step": args.trajectories // args.group,
            "group_size": args.group,
            "max_turns": 3,
            "max_prompt_tokens": 512,
            "max_response_tokens": 256,
            "max_obs_tokens": 128,
            "max_model_tokens": 2048,
            "kv_cache_gib": 1.0,
        },
        "learner": {
            "dtype": "float32",
            "zero_stage": 0,
            "lr": 1e-9,  # the model is to stay as it is
            "minibatches_per_batch": 2,
            "tokens_per_microbatch": 8192,
        },
        "algorithm": {"loss": "grpo"},
        "trainer": {"steps": args.steps, "checkpoint_every": 0, "eval_at_ends": False},
    }


def trained(args: argparse.Namespace, model: Path, url: str, name: str) -> int:
    """Exit status of a run against this retriever."""
    file = args.out / f"{name}.yaml"
    with file.open("w", encoding="utf-8") as out:
        YAML().dump(configuration(args, model, url, name), out)
    command = [sys.executable, "-m", "trainer", "train", "--config", str(file), *args.set]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    return subprocess.run(command, cwd=ROOT, env=environment, stdout=sys.stderr, check=False).returncode


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("index", type=Path, nargs="+", help="each gets a run of its own, in this order")
    parser.add_argument("--corpus", type=Path, required=True, help="lines with `contents`, for the tokenizer")
    parser.add_argument("--questions", type=Path, required=True, help="lines with `question`")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--trajectories", type=int, default=256, help="of a step, all at the same time")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2, help="processes of the retriever")
    parser.add_argument("--thought", type=float, default=60.0, help="mean tokens of a thought")
    parser.add_argument("--searches", type=float, default=1.2, help="mean searches of a trajectory")
    parser.add_argument("--set", nargs="*", default=[], help="changes to the configuration")
    args = parser.parse_args()
    args.out = args.out.resolve()
    texts = sorted({question["question"] for question in read_questions(args.questions)})
    model = make_searcher(
        "tiny", args.corpus, args.out / "model", thought=args.thought, searches=args.searches, queries=texts
    )
    print(json.dumps(machine()), flush=True)
    for number, index in enumerate(args.index):
        with server("--index", index, "--cache-size", 0, "--workers", args.workers) as (url, process):
            before = all_cpu_seconds(process)
            status = trained(args, model, url, f"beside-{number}")
            spent = all_cpu_seconds(process) - before
        run = args.out / f"beside-{number}"
        total = 0
        for metrics in json_lines(run / "metrics.jsonl"):
            found = waits(read_spans(run, metrics["step"]))
            total += int(found["searches"])
            parts = ("step", "rollout", "update", "sync")
            times = {f"{name}_seconds": metrics.get(f"time/{name}") for name in parts}
            line = {"index": str(index), "step": metrics["step"], **times, **found}
            print(json.dumps(line), flush=True)
        if status:
            raise SystemExit(f"unspiral train ended with status {status}")
        cpu = {"index": str(index), "searches": total, "retriever_cpu_ms_per_search": 1000 * spent / total}
        print(json.dumps(cpu), flush=True)


if __name__ == "__main__":
    main()
