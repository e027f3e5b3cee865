"""Rollouts: every trajectory on its own against a turn barrier. Same engine, same questions, the real
retriever service.

One worker in this process, without Ray; the retriever has a process of its own, as in a run. The ways take
turns (A B A B); each round begins with an empty prefix cache. Beside tokens per second: the processor time
that this process (vLLM's front end and the agent loop) and the engine's spend on a token, and the share of
time in which the GPU is busy. With --profile py-spy looks at both processes for so many seconds, in further
rounds: functions of either, and the processor time per token of each part of the engine's.

With --beside further engines run with other arguments of vLLM, and take turns with the first.

The end of a round belongs to its longest trajectories, so a rate over whole rounds says little about a
worker that always has work. With --in-flight a new trajectory begins whenever one ends, and `steady` is the
rate while all places are taken, until the last one begins. The barrier takes as many at a time, one batch
after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from benchmarks.gpu.retriever import served
from benchmarks.gpu.steady import Steady, tokens_of
from benchmarks.gpu.watch import BusyShare, Profile, busiest, seconds_of
from services.contracts import Question, TrajectoryRequest
from services.rollout.engines import vllm_engine
from services.rollout.worker.worker import RolloutWorker
from services.settings import RolloutSettings
from trainer.data import load_questions

WAYS = ["asynchronous", "barrier"]
OWN = "vLLM's own front end"
SENT = "each token sent"
BESIDE: dict[str, dict[str, bool]] = {OWN: {}, SENT: {"unspiral_ids_only": True}}
"""Asynchronous rounds whose requests go another way through the front end, with their `extra_args`: that of
vLLM itself, and ours without tokens that wait in the engine's process."""


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
        "--in-flight", type=int, nargs="+", metavar="N", help="so many at a time, each in turn; default: all"
    )
    parser.add_argument("--times", type=int, default=4, help="with --in-flight: so many times as many in all")
    parser.add_argument("--head-dtype", choices=["model", "float32"], default="model")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument(
        "--beside-own",
        action="store_true",
        help="each round also with vLLM's own front end, and with ours but each token sent at once, in turns",
    )
    parser.add_argument(
        "--beside",
        type=beside,
        action="append",
        default=[],
        metavar="NAME=JSON",
        help='each round also on an engine with these arguments of vLLM\'s, as 128={"max_num_seqs":128}',
    )
    parser.add_argument("--profile", type=int, default=0, help="seconds of py-spy, in further rounds")
    parser.add_argument("--seconds", type=float, default=3600.0, help="of rounds: none begins after so long")
    parser.add_argument("--memory", type=float, default=0.8, help="rollout.gpu_memory_utilization")


def beside(text: str) -> tuple[str, dict[str, Any]]:
    """A name, and arguments of vLLM's."""
    name, equals, value = text.partition("=")
    try:
        given = json.loads(value)
    except ValueError:
        given = None
    if not (name and equals and isinstance(given, dict)) or "," in name or name in (*WAYS, *BESIDE):
        raise argparse.ArgumentTypeError(f'{text!r} is not of the form NAME={{"argument": value}}')
    return name, given


def run(args: Any) -> dict[str, Any]:
    with served(args.data / "corpus.jsonl") as url:
        return asyncio.run(_run(args, url))


async def _run(args: Any, url: str) -> dict[str, Any]:
    engines = 1 + len(args.beside)
    settings = RolloutSettings(
        engine=args.engine,
        max_turns=args.max_turns,
        max_response_tokens=args.max_response_tokens,
        max_model_tokens=int(os.environ.get("UNSPIRAL_BENCHMARK_MODEL_TOKENS", "4096")),
        temperature=args.temperature,
        gpu_memory_utilization=args.memory / engines,
        compile=args.compile,
        head_dtype=args.head_dtype,
        tensor_parallel=args.tensor_parallel,
    )
    questions = load_questions(str(args.data / "train.jsonl"), skip_bad=False).rows
    sizes = args.in_flight or [None]
    if args.in_flight and (most := max(sizes) * args.times) > len(questions):
        raise SystemExit(
            f"--in-flight {max(sizes)} --times {args.times} need {most} questions, not {len(questions)}"
        )
    async with AsyncExitStack() as stack:
        workers = {}
        began = time.monotonic()
        for name, more in [("", {}), *args.beside]:
            workers[name] = await stack.enter_async_context(_started(settings, args.model, url, more))
            if not name:
                started = time.monotonic() - began
        worker = workers[""]
        out: dict[str, Any] = {
            "start_seconds": started,
            "trajectories": max(args.in_flight) * args.times if args.in_flight else args.trajectories,
            "model": str(args.model),
            "head_dtype": args.head_dtype,
            "tensor_parallel": args.tensor_parallel,
            "beside": dict(args.beside),
        }
        requests = [
            TrajectoryRequest(f"w-{i}", "w", q, i, args.temperature) for i, q in enumerate(questions[:16])
        ]
        for each in workers.values():
            await asyncio.gather(*map(each.rollout, requests))  # warms up
        ways = [*args.ways, *(BESIDE if args.beside_own else []), *dict(args.beside)]
        runs: dict[str, list[dict[str, Any]]] = {name_of(way, n): [] for n in sizes for way in ways}
        first = time.monotonic()
        for repeat, places, way in itertools.product(range(args.repeats), sizes, ways):
            if time.monotonic() - first >= args.seconds:
                print(f"no round begins after {args.seconds:g} s", flush=True)
                break
            taken = questions[: places * args.times if places else args.trajectories]
            with front_end(BESIDE[way]) if way in BESIDE else nullcontext():
                done = await _round(workers.get(way, worker), taken, way, repeat, args.temperature, places)
            runs[name_of(way, places)].append(done)
            print(name_of(way, places), json.dumps(done), flush=True)
        if args.profile:
            out |= await _profiled(worker, args, questions, sizes[-1])
    return out | compared(runs, sizes)


@asynccontextmanager
async def _started(
    settings: RolloutSettings, model: str, url: str, more: dict[str, Any]
) -> AsyncIterator[RolloutWorker]:
    """A worker whose engine has further arguments of vLLM's."""
    own = vllm_engine._arguments
    worker = RolloutWorker(
        "bench", settings, model_path=model, retriever_url=url, retriever_timeout_seconds=60.0, seed=1
    )
    vllm_engine._arguments = lambda *given: own(*given) | more
    try:
        await worker.start()
    finally:
        vllm_engine._arguments = own
    try:
        yield worker
    finally:
        await worker.close()


async def _profiled(
    worker: RolloutWorker, args: Any, questions: list[Question], places: int | None
) -> dict[str, Any]:
    """Rounds of the first way while py-spy looks."""
    engine = busiest(worker.engine_pids())
    taken = questions[: places * args.times if places else args.trajectories]
    rounds = []
    with (
        Profile(args.out / "rollout.stacks", args.profile) as profile,
        Profile(args.out / "engine.stacks", args.profile if engine else 0, engine) as beside,
    ):
        ends = time.monotonic() + args.profile
        while time.monotonic() < ends:
            repeat = args.repeats + len(rounds)
            rounds.append(await _round(worker, taken, args.ways[0], repeat, args.temperature, places))
            print("profiled", json.dumps(rounds[-1]), flush=True)
    cost = statistics.mean(r["engine_us_per_token"] for r in rounds)
    return {
        "top": profile.top,
        "top_of_engine": beside.top,
        "engine_us_by_part": {part: share * cost for part, share in beside.parts.items()},
    }


def compared(runs: dict[str, list[dict[str, Any]]], sizes: list[int | None]) -> dict[str, Any]:
    """The rounds that were run, and the ratio of both ways for each size that has both."""
    out: dict[str, Any] = {name: rows for name, rows in runs.items() if rows}
    rates = {name: statistics.median(map(rate_of, rows)) for name, rows in out.items()}
    for places in sizes:
        one, other = (rates.get(name_of(way, places)) for way in WAYS)
        if one and other:
            out[name_of("ratio", places)] = one / other
    return out


def name_of(way: str, places: int | None) -> str:
    return way if places is None else f"{way}, {places} in flight"


def rate_of(row: dict[str, Any]) -> float:
    """Tokens per second, while all places are taken where that was measured."""
    return row.get("steady_tokens_per_s") or row["tokens_per_s"]


@contextmanager
def front_end(marks: dict[str, bool]) -> Iterator[None]:
    """Requests have other marks meanwhile."""
    kept = vllm_engine.IDS_ONLY
    vllm_engine.IDS_ONLY = marks
    try:
        yield
    finally:
        vllm_engine.IDS_ONLY = kept


def engine_seconds(worker: RolloutWorker) -> float:
    """Processor time of the engine's processes so far."""
    return sum(map(seconds_of, worker.engine_pids()))


async def _round(
    worker: RolloutWorker,
    questions: list[Question],
    way: str,
    repeat: int,
    temperature: float,
    places: int | None,
) -> dict[str, Any]:
    """One trajectory per question, so many at a time, from an empty prefix cache."""
    batch = [
        TrajectoryRequest(f"{way}-{repeat}-{i}", f"g{i}", q, i, temperature) for i, q in enumerate(questions)
    ]
    await worker._engine.reset_prefix_cache()
    steady = Steady(len(batch), places or len(batch), BusyShare())
    with BusyShare() as busy:
        started, processor, engine = time.perf_counter(), time.process_time(), engine_seconds(worker)
        if way == "barrier":
            done = []
            size = places or len(batch)
            for first in range(0, len(batch), size):
                done += await worker.rollout_batch(batch[first : first + size])
        else:
            done = await steady.run(worker, batch)
        seconds, processor = time.perf_counter() - started, time.process_time() - processor
        engine = engine_seconds(worker) - engine
    written = sum(map(tokens_of, done))
    return {
        "seconds": seconds,
        "tokens": written,
        "tokens_per_s": written / seconds,
        "turns": statistics.mean(len(t.actions) for t in done),
        "searches": sum(a.kind == "search" for t in done for a in t.actions) / len(done),
        "us_per_token": processor / written * 1e6,
        "engine_us_per_token": engine / written * 1e6,
        "busy": busy.mean,
        **steady.numbers(),
    }


def is_way(name: str, more: Iterable[str] = ()) -> bool:
    return name.partition(",")[0] in (*WAYS, *BESIDE, *more)


def table(out: dict[str, Any]) -> str:
    lines = [f"{out['trajectories']} trajectories, engine up in {out['start_seconds']:.0f} s"]
    rows = {name: value for name, value in out.items() if is_way(name, out.get("beside", ()))}
    width = max(map(len, rows), default=0)
    for name in rows:
        rates = ", ".join(f"{r['tokens_per_s']:,.0f}" for r in out[name])
        last = out[name][-1]
        told = [f"turns a trajectory {last['turns']:.2f}"]
        if "us_per_token" in last:
            told.append(f"{last['us_per_token']:.1f} us of processor a token")
        if "engine_us_per_token" in last:
            told.append(f"{last['engine_us_per_token']:.1f} in the engine's process")
        if last.get("busy") is not None:
            told.append(f"GPU busy {last['busy']:.0%}")
        if "steady_tokens_per_s" in last:
            told.append("steady " + ", ".join(f"{rate_of(r):,.0f}" for r in out[name]))
        if last.get("steady_busy") is not None:
            told.append(f"busy {last['steady_busy']:.0%} then")
        lines.append(f"{name:{width}} tokens/s {rates}   ({', '.join(told)})")
    lines += [f"{name} {value:.2f}" for name, value in out.items() if name.startswith("ratio")]
    lines += [f"{us:8.1f} us a token  {part}" for part, us in out.get("engine_us_by_part", {}).items()]
    for name in ("top", "top_of_engine"):
        lines += [
            f"{name}:" * bool(out.get(name)),
            *(f"  {share:6.1%} {f}" for f, share in out.get(name, [])),
        ]
    return "\n".join(filter(None, lines))
