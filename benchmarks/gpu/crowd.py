"""Rollouts: one worker on a GPU against several (`rollout.workers_per_gpu`), each in a process of its own, as
in a run.

For each number of --workers the engines start one after the other, divide the memory and the places of
--in-flight, and run --repeats rounds; then they end, and the next number follows. A number may come twice
(1 4 1), to see what the host did meanwhile. In a round every worker has its share of the questions, and
begins a new trajectory whenever one ends. `steady` is the rate of all workers together while all places of
all of them are taken, counted as by `rollout`.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks.gpu.retriever import served
from benchmarks.gpu.rollout import engine_seconds, rate_of
from benchmarks.gpu.steady import Life, Steady, Window, rate_within
from benchmarks.gpu.watch import BusyShare
from services.contracts import Question, TrajectoryRequest
from services.rollout.pool.shares import of_one_worker
from services.rollout.worker.worker import RolloutWorker
from services.settings import RolloutSettings
from trainer.data import load_questions

START_SECONDS = 600.0
ROUND_SECONDS = 3600.0
WARM_UP = 16
"""Questions of each worker before its first round."""


@dataclass(frozen=True)
class Share:
    """One worker's part of a round."""

    name: str
    questions: list[Question]
    places: int
    temperature: float


@dataclass(frozen=True)
class Done:
    """What a worker says of its part."""

    lives: list[Life]
    window: Window | None
    """In which all its places were taken."""
    searches: int
    processor: float
    """Seconds of processor time of the worker's own process."""
    engine: float
    """The same of its engine's."""


def arguments(parser: Any) -> None:
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder with corpus.jsonl and train.jsonl")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4], metavar="N")
    parser.add_argument("--in-flight", type=int, default=256, help="trajectories at a time, of all workers")
    parser.add_argument("--times", type=int, default=4, help="so many times as many in all")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--max-turns", type=int, default=4)
    parser.add_argument("--max-response-tokens", type=int, default=500)
    parser.add_argument("--max-model-tokens", type=int, default=4096)
    parser.add_argument("--engine", choices=["vllm", "transformers"], default="vllm")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument(
        "--compile", choices=["full", "graphs", "off"], default="full", help="rollout.compile"
    )
    parser.add_argument("--memory", type=float, default=0.8, help="rollout.gpu_memory_utilization, of all")
    parser.add_argument("--cache", type=float, help="rollout.kv_cache_gib, of each worker")


def run(args: Any) -> dict[str, Any]:
    questions = load_questions(str(args.data / "train.jsonl"), skip_bad=False).rows
    needed = args.in_flight * args.times
    if needed > len(questions):
        raise SystemExit(
            f"--in-flight {args.in_flight} --times {args.times} need {needed} questions, not {len(questions)}"
        )
    if args.times < 2 or args.in_flight < max(args.workers):
        raise SystemExit("--times must be 2 or more, and --in-flight at least the largest of --workers")
    taken = questions[:needed]
    rounds: dict[str, list[dict[str, Any]]] = {}
    with served(args.data / "corpus.jsonl") as url:
        for n in args.workers:
            began = time.monotonic()
            with _started(n, args, url) as workers:
                up = time.monotonic() - began
                _all(workers, deal(taken[: WARM_UP * n], n, WARM_UP * n, "warm", args.temperature))
                for repeat in range(args.repeats):
                    name = f"{n}-{repeat}-{len(rounds)}"
                    row = _round(workers, deal(taken, n, args.in_flight, name, args.temperature))
                    row["start_seconds"] = up
                    rounds.setdefault(name_of(n), []).append(row)
                    print(name_of(n), json.dumps(row), flush=True)
    return {
        "model": str(args.model),
        "in_flight": args.in_flight,
        "trajectories": needed,
        "max_turns": args.max_turns,
        "rounds": rounds,
        "ratio": ratios(rounds),
    }


def name_of(n: int) -> str:
    return f"{n} worker{'s' if n > 1 else ''}"


def deal(questions: list[Question], n: int, places: int, name: str, temperature: float) -> list[Share]:
    """Questions and places over `n` workers, like cards."""
    return [
        Share(f"{name}-{k}", questions[k::n], places // n + (k < places % n), temperature) for k in range(n)
    ]


def ratios(rounds: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """The median rate of each number of workers, by that of the first."""
    rates = {name: statistics.median(map(rate_of, rows)) for name, rows in rounds.items()}
    first, *others = rates
    return {name: rates[name] / rates[first] for name in others}


def _round(workers: list[_Process], shares: list[Share]) -> dict[str, Any]:
    began = time.monotonic()
    with BusyShare() as busy:
        done = _all(workers, shares)
    return numbers(done, began) | {"busy": busy.mean}


def numbers(done: list[Done], began: float) -> dict[str, Any]:
    """A round of all workers together, which began at that moment."""
    lives = [life for worker in done for life in worker.lives]
    tokens = sum(life.tokens for life in lives)
    seconds = max(life.ended for life in lives) - began
    out = {
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_s": tokens / seconds,
        "searches": sum(d.searches for d in done) / len(lives),
        "us_per_token": sum(d.processor for d in done) / tokens * 1e6,
        "engine_us_per_token": sum(d.engine for d in done) / tokens * 1e6,
    }
    rate = rate_within(lives, [d.window for d in done])
    return out if rate is None else out | {"steady_tokens_per_s": rate}


# -- processes


class _Process:
    """A worker in a process of its own, seen from outside."""

    def __init__(self, index: int, settings: RolloutSettings, model: str, url: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.index = index
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, index, settings, model, url))
        self._process.start()
        theirs.close()

    def answer(self, seconds: float) -> Any:
        """Raises SystemExit where the process ends first, or does not answer in time."""
        ready = wait([self.pipe, self._process.sentinel], timeout=seconds)
        if self.pipe in ready:
            try:
                return self.pipe.recv()
            except (EOFError, ConnectionResetError):
                self._process.join(10)
        why = f"ended with status {self._process.exitcode}" if ready else f"said nothing for {seconds:g} s"
        raise SystemExit(f"worker {self.index} {why}")

    def close(self) -> None:
        self.pipe.close()
        self._process.join(60)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


@contextmanager
def _started(n: int, args: Any, url: str) -> Iterator[list[_Process]]:
    settings = RolloutSettings(
        engine=args.engine,
        workers=n,
        workers_per_gpu=n,
        max_turns=args.max_turns,
        max_response_tokens=args.max_response_tokens,
        max_model_tokens=args.max_model_tokens,
        temperature=args.temperature,
        gpu_memory_utilization=args.memory,
        kv_cache_gib=args.cache,
        compile=args.compile,
    )
    with ExitStack() as stack:
        workers = []
        for k in range(n):
            worker = _Process(k, of_one_worker(settings), args.model, url)
            stack.callback(worker.close)
            worker.answer(START_SECONDS)  # one after the other: vLLM measures the free memory
            workers.append(worker)
        yield workers


def _all(workers: list[_Process], shares: list[Share]) -> list[Done]:
    for worker, share in zip(workers, shares, strict=True):
        worker.pipe.send(share)
    return [worker.answer(ROUND_SECONDS) for worker in workers]


def _serve(pipe: Connection, index: int, settings: RolloutSettings, model: str, url: str) -> None:
    """A worker's process: says that it is up, then answers each Share with a Done until its pipe ends."""
    asyncio.run(_answering(pipe, index, settings, model, url))


async def _answering(pipe: Connection, index: int, settings: RolloutSettings, model: str, url: str) -> None:
    worker = RolloutWorker(
        f"w{index}.1",
        settings,
        model_path=model,
        retriever_url=url,
        retriever_timeout_seconds=60.0,
        seed=index + 1,
    )
    await worker.start()
    try:
        pipe.send("up")
        while True:
            try:
                share = await asyncio.to_thread(pipe.recv)
            except (EOFError, ConnectionResetError):  # the latter where it leaves an answer unread
                return
            pipe.send(await run_share(worker, share))
    finally:
        await worker.close()


async def run_share(worker: RolloutWorker, share: Share) -> Done:
    """A worker's part of a round, from an empty prefix cache."""
    engine = worker._engine
    assert engine is not None
    await engine.reset_prefix_cache()
    steady = Steady(len(share.questions), share.places)
    processor, engines = time.process_time(), engine_seconds(worker)
    uids = [f"{share.name}-{i}" for i in range(len(share.questions))]
    done = await steady.run(
        worker,
        [
            TrajectoryRequest(uid, uid, question, i, share.temperature)
            for i, (uid, question) in enumerate(zip(uids, share.questions, strict=True))
        ],
    )
    return Done(
        steady.lives,
        steady.window,
        sum(action.kind == "search" for trajectory in done for action in trajectory.actions),
        time.process_time() - processor,
        engine_seconds(worker) - engines,
    )


def table(out: dict[str, Any]) -> str:
    lines = [f"{out['trajectories']} trajectories a round, {out['in_flight']} in flight on all workers"]
    width = max(map(len, out["rounds"]))
    for name, rows in out["rounds"].items():
        last = rows[-1]
        told = [f"up in {last['start_seconds']:.0f} s"]
        told.append(f"{last['us_per_token']:.1f} us of processor a token")
        told.append(f"{last['engine_us_per_token']:.1f} in the engines' processes")
        if last.get("busy") is not None:
            told.append(f"GPU busy {last['busy']:.0%}")
        rates = ", ".join(f"{row['tokens_per_s']:,.0f}" for row in rows)
        steady = [f"{row['steady_tokens_per_s']:,.0f}" for row in rows if "steady_tokens_per_s" in row]
        if steady:
            rates += f", steady {', '.join(steady)}"
        lines.append(f"{name:{width}} tokens/s {rates}   ({', '.join(told)})")
    first = next(iter(out["rounds"]))
    lines += [f"ratio {name} by {first} {value:.2f}" for name, value in out["ratio"].items()]
    return "\n".join(lines)
