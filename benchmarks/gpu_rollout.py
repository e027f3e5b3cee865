"""Rollouts: every trajectory on its own against a turn barrier. Same engine, same questions, the real
retriever service.

One worker in this process, without Ray. The two ways take turns (A B A B); each begins with an empty prefix
cache.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from retriever_service.http.launch import serve_in_thread
from retriever_service.indexing.build import build_index
from retriever_service.settings import ServerSettings
from services.contracts import TrajectoryRequest
from services.rollout.worker.worker import RolloutWorker
from services.settings import RolloutSettings
from trainer.data import load_questions

WAYS = ["asynchronous", "barrier"]


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


def run(args: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        build_index(args.data / "corpus.jsonl", Path(folder) / "index")
        with serve_in_thread(ServerSettings(index=str(Path(folder) / "index"), port=0)) as server:
            return asyncio.run(_run(args, server.url))


async def _run(args: Any, url: str) -> dict[str, Any]:
    settings = RolloutSettings(
        engine=args.engine,
        max_turns=args.max_turns,
        max_response_tokens=args.max_response_tokens,
        max_model_tokens=int(os.environ.get("UNSPIRAL_BENCHMARK_MODEL_TOKENS", "4096")),
        temperature=args.temperature,
        gpu_memory_utilization=0.8,
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
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in args.ways}
        for repeat in range(args.repeats):
            for name in runs:
                batch = [
                    TrajectoryRequest(f"{name}-{repeat}-{i}", f"g{i}", q, i, args.temperature)
                    for i, q in enumerate(questions)
                ]
                await worker._engine.reset_prefix_cache()
                started = time.perf_counter()
                if name == "barrier":
                    done = await worker.rollout_batch(batch)
                else:
                    done = list(await asyncio.gather(*(worker.rollout(r) for r in batch)))
                seconds = time.perf_counter() - started
                written = sum(len(a.token_ids) for t in done for a in t.actions)
                turns = statistics.mean(len(t.actions) for t in done)
                runs[name].append(
                    {"seconds": seconds, "tokens": written, "tokens_per_s": written / seconds, "turns": turns}
                )
                print(name, json.dumps(runs[name][-1]), flush=True)
    finally:
        await worker.close()
    out |= runs
    rates = {name: statistics.median(r["tokens_per_s"] for r in rows) for name, rows in runs.items()}
    if len(rates) == 2:
        out["ratio"] = rates["asynchronous"] / rates["barrier"]
    return out


def table(out: dict[str, Any]) -> str:
    lines = [f"{out['trajectories']} trajectories, engine up in {out['start_seconds']:.0f} s"]
    for name in (n for n in WAYS if n in out):
        rates = ", ".join(f"{r['tokens_per_s']:,.0f}" for r in out[name])
        lines.append(f"{name:14} tokens/s {rates}   (turns a trajectory {out[name][0]['turns']:.2f})")
    return "\n".join([*lines, f"ratio {out['ratio']:.2f}"] if "ratio" in out else lines)
