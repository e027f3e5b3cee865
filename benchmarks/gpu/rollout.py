"""Rollouts: every trajectory on its own against a turn barrier. Same engine, same questions, the real
retriever service.

One worker in this process, without Ray; the retriever has a process of its own, as in a run. The two ways
take turns (A B A B); each begins with an empty prefix cache. Beside tokens a second: the processor time that
this process (vLLM's front end and the agent loop) spends on a token, and the share of time in which the GPU
is busy. With --profile py-spy looks at the process for so many seconds, in further rounds.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from benchmarks.gpu.retriever import served
from benchmarks.gpu.watch import BusyShare, Profile
from services.contracts import Question, TrajectoryRequest
from services.rollout.engines import vllm_engine
from services.rollout.worker.worker import RolloutWorker
from services.settings import RolloutSettings
from trainer.data import load_questions

WAYS = ["asynchronous", "barrier"]
OWN = "vLLM's own front end"
"""Name of the asynchronous rounds without ours."""


def arguments(parser: Any) -> None:
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder with corpus.jsonl and train.jsonl")
    parser.add_argument("--trajectories", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--max-turns", type=int, default=4)
    parser.add_argument("--max-response-tokens", type=int, default=500)
    parser.add_argument("--engine", choices=["vllm", "transformers"], default="vllm")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument(
        "--compile", choices=["full", "graphs", "off"], default="full", help="rollout.compile"
    )
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS)
    parser.add_argument(
        "--beside-own", action="store_true", help="each round also with vLLM's own front end, in turns"
    )
    parser.add_argument("--profile", type=int, default=0, help="seconds of py-spy, in a further round")
    parser.add_argument("--memory", type=float, default=0.8, help="rollout.gpu_memory_utilization")


def run(args: Any) -> dict[str, Any]:
    with served(args.data / "corpus.jsonl") as url:
        return asyncio.run(_run(args, url))


async def _run(args: Any, url: str) -> dict[str, Any]:
    settings = RolloutSettings(
        engine=args.engine,
        max_turns=args.max_turns,
        max_response_tokens=args.max_response_tokens,
        max_model_tokens=int(os.environ.get("UNSPIRAL_BENCHMARK_MODEL_TOKENS", "4096")),
        temperature=args.temperature,
        gpu_memory_utilization=args.memory,
        compile=args.compile,
    )
    questions = load_questions(str(args.data / "train.jsonl"), skip_bad=False).rows[: args.trajectories]
    worker = RolloutWorker(
        "bench", settings, model_path=args.model, retriever_url=url, retriever_timeout_seconds=60.0, seed=1
    )
    began = time.monotonic()
    await worker.start()
    out: dict[str, Any] = {"start_seconds": time.monotonic() - began, "trajectories": len(questions)}
    try:
        requests = [TrajectoryRequest(f"w-{i}", "w", q, i, args.temperature) for i, q in enumerate(questions)]
        await asyncio.gather(*(worker.rollout(r) for r in requests[:16]))  # warms up
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in args.ways}
        if args.beside_own:
            runs[OWN] = []
        for repeat in range(args.repeats):
            for name in runs:
                with own_front_end() if name == OWN else nullcontext():
                    runs[name].append(await _round(worker, questions, name, repeat, args.temperature))
                print(name, json.dumps(runs[name][-1]), flush=True)
        if args.profile:
            with Profile(args.out / "rollout.stacks", args.profile) as profile:
                ends = time.monotonic() + args.profile
                repeat = args.repeats
                while time.monotonic() < ends:
                    await _round(worker, questions, args.ways[0], repeat, args.temperature)
                    repeat += 1
            out["top"] = profile.top
    finally:
        await worker.close()
    out |= runs
    rates = {name: statistics.median(r["tokens_per_s"] for r in rows) for name, rows in runs.items()}
    if {"asynchronous", "barrier"} <= rates.keys():
        out["ratio"] = rates["asynchronous"] / rates["barrier"]
    return out


@contextmanager
def own_front_end() -> Iterator[None]:
    """Requests go vLLM's own way through its front end."""
    kept = vllm_engine.IDS_ONLY
    vllm_engine.IDS_ONLY = {}
    try:
        yield
    finally:
        vllm_engine.IDS_ONLY = kept


async def _round(
    worker: RolloutWorker, questions: list[Question], way: str, repeat: int, temperature: float
) -> dict[str, Any]:
    """One trajectory a question, from an empty prefix cache."""
    batch = [
        TrajectoryRequest(f"{way}-{repeat}-{i}", f"g{i}", q, i, temperature) for i, q in enumerate(questions)
    ]
    await worker._engine.reset_prefix_cache()
    with BusyShare() as busy:
        started, processor = time.perf_counter(), time.process_time()
        if way == "barrier":
            done = await worker.rollout_batch(batch)
        else:
            done = list(await asyncio.gather(*(worker.rollout(r) for r in batch)))
        seconds, processor = time.perf_counter() - started, time.process_time() - processor
    written = sum(len(a.token_ids) for t in done for a in t.actions)
    return {
        "seconds": seconds,
        "tokens": written,
        "tokens_per_s": written / seconds,
        "turns": statistics.mean(len(t.actions) for t in done),
        "searches": sum(a.kind == "search" for t in done for a in t.actions) / len(done),
        "us_per_token": processor / written * 1e6,
        "busy": busy.mean,
    }


def table(out: dict[str, Any]) -> str:
    lines = [f"{out['trajectories']} trajectories, engine up in {out['start_seconds']:.0f} s"]
    for name in (n for n in [*WAYS, OWN] if n in out):
        rates = ", ".join(f"{r['tokens_per_s']:,.0f}" for r in out[name])
        last = out[name][-1]
        busy = "" if last.get("busy") is None else f", GPU busy {last['busy']:.0%}"
        cost = "" if "us_per_token" not in last else f", {last['us_per_token']:.1f} us of processor a token"
        lines.append(
            f"{name:{len(OWN)}} tokens/s {rates}   (turns a trajectory {last['turns']:.2f}{cost}{busy})"
        )
    if "ratio" in out:
        lines.append(f"ratio {out['ratio']:.2f}")
    return "\n".join([*lines, *(f"  {share:6.1%} {name}" for name, share in out.get("top", []))])
