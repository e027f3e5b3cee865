"""Weight sync on GPUs: do sampler and learner agree, how long does a sync take, what does a loss cost.

    python -m benchmarks.gpu_sync agreement [--model DIR] [--temperatures 1.0 0.6] [--syncs 50]
    python -m benchmarks.gpu_sync speed [--sizes 0.5b 1.5b 3b 7b] [--stages 2 3] [--repeats 5]
    python -m benchmarks.gpu_sync loss [--sizes 3b]

Needs two GPUs or more: one for the learner, the others one rollout worker each (three are used at most). No
network. Models are random weights in the shapes of Qwen2.5, unless --model names a folder. Everything runs
through the real Ray actors, pool and learner; `speed` also calls vLLM's own weight transfer engine bare,
between the same processes. Prints progress, a JSON line for each result, and a table last; exits with 1 where
a check fails and 3 where there are too few GPUs, or too few threads left. --backend gloo --device cpu runs
the same on CPUs, for a try.

Nearly all of the time goes into starts. Give several of these the same --turns FILE and a share of the cards
(--memory 0.15), and start them at the same time: they start beside each other, and measure in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray

from benchmarks.gpu.machine import machine, no_room
from benchmarks.gpu.shapes import SHAPES, make_model
from benchmarks.gpu.sync.actors import BenchRank, BenchWorker, WeightsOnlyRank
from benchmarks.gpu.sync.agreeing import Look, agree, drift_of
from benchmarks.gpu.sync.batches import random_batch, spread
from benchmarks.gpu.sync.striking import Blow, failed, struck, until_broken
from benchmarks.gpu.sync.turns import turn
from benchmarks.gpu.sync.world import World, say
from services.local_ray import start_local_ray, stop_local_ray
from services.rollout.pool import placement
from services.worker_state import WorkerState

ROOT = Path(__file__).resolve().parents[1]
WEIGHTS_ONLY = ("7b",)
PARAMETERS_GB = {"tiny": 0.1, "0.5b": 1, "1.5b": 3.1, "3b": 6.2, "7b": 15.3}
"""Size of a model in bfloat16."""
MORE_BY_A_LOSS = 0.005
"""Nats, in the mean, that a worker which joined after a loss may be farther from the learner than after a
plain sync of the same weights."""
BLOWS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
RESULTS: list[dict[str, Any]] = []


def result(**fields: Any) -> None:
    RESULTS.append(fields)
    print("RESULT " + json.dumps(fields), flush=True)


async def agreement(options: argparse.Namespace, folder: Path, workers: int) -> bool:
    """Log-probs of sampler and learner after 0, 1, 10, ... syncs with training in between, and as many with a
    learning rate of 0: of text that the sampler has just written, and of random ids, which any two
    computations in bfloat16 score differently. Beside it the learner's own distance to itself in float32."""
    model = options.model or make_model(options.sizes[0], folder, eager=options.eager)
    good = True
    async with World(options, model, workers) as world:
        probe = random_batch(8, 64, world.vocabulary, 99)
        for number, temperature in enumerate(options.temperatures):
            begin = world.start_learner if number else world.start
            await begin(temperature=temperature, stage=options.stages[0])
            start = (await asyncio.to_thread(world.learner.score, probe)).logp
            for name, scale in (("training", 1.0), ("lr=0", 0.0)):
                marks = [n for n in (1, 10, 25, 50, 100, options.syncs) if n <= options.syncs]
                looks: list[Look] = []
                for n in range(1, options.syncs + 1):
                    batch = random_batch(16, 128, world.vocabulary, n)
                    async with turn(options.turns):
                        await asyncio.to_thread(world.learner.update, batch, llds_lambda=0.0, lr_scale=scale)
                        seconds = await world.sync()
                        if n not in marks:
                            continue
                        text = await world.sampled(temperature)
                        seen = await world.differences(text, temperature)
                        ids = await world.differences(probe, temperature)
                        moved = np.abs((await asyncio.to_thread(world.learner.score, probe)).logp - start)
                    own = await world.rank("rounding", text) if options.stages[0] < 3 else None
                    moved = float(moved[probe.action_ids >= 0].mean())
                    looks.append(Look(seen["mean"], own))
                    result(
                        what="agreement",
                        phase=name,
                        T=temperature,
                        syncs=n,
                        moved=moved,
                        sync_s=seconds,
                        random_ids=ids["mean"],
                        learner_float32=own,
                        mark=looks[-1].mark,
                        **seen,
                    )
                ok = agree(looks)
                good &= ok
                result(
                    what="agreement",
                    phase=name,
                    T=temperature,
                    check="each mean < its mark, no drift",
                    drift=drift_of(looks),
                    ok=ok,
                )
    return good


async def timed(world: World, count: int) -> dict[str, float]:
    """Syncs to the first workers, and beside each one of vLLM's own engine."""
    options = world.options
    said = {"first_s": await world.sync(only=count)}
    if options.device == "gpu":
        await world.rank("memory_gib")  # from here on
    beside = options.bare and options.device == "gpu"
    if beside:
        handles = [m.worker.actor for m in world.pool._roster.all()][:count]
        said["bare_init_s"] = await world.rank("bare_init", handles)
        await world.rank("bare_send")
    ours, bare = [], []
    for _ in range(options.repeats):  # in turns: the host's own noise meets both
        ours.append(await world.sync(only=count))
        if beside:
            bare.append(await world.rank("bare_send"))
    said |= spread("ours", ours)
    if options.device == "gpu":
        said["learner_peak_gib"] = await world.rank("memory_gib")
    if beside:
        said |= spread("bare", bare)
        said |= spread("ratio", [a / b for a, b in zip(ours, bare, strict=True)])
    return said


async def speed(options: argparse.Namespace, folder: Path, workers: int) -> bool:
    """Seconds of a sync, ours and vLLM's own engine called bare, by size, ZeRO stage and number of
    workers."""
    for size in options.sizes:
        model = make_model(size, folder, eager=True)
        async with World(options, model, workers) as world:
            only = size in WEIGHTS_ONLY or options.weights_only
            for number, stage in enumerate(options.stages[:1] if only else options.stages):
                begin = world.start_learner if number else world.start
                await begin(actor=WeightsOnlyRank if only else BenchRank, stage=stage)
                for count in sorted({1, workers}):
                    about = {"what": "speed", "size": size, "zero": 0 if only else stage, "workers": count}
                    async with turn(options.turns):
                        result(**about, **await timed(world, count))
        shutil.rmtree(model)
    return True


async def loss(options: argparse.Namespace, folder: Path, workers: int) -> bool:
    """A worker is killed in mid-broadcast, another stopped: the learner goes on within the timeout, a new
    worker joins, and its log-probs are as near to the learner's as after a sync without a loss.

    That distance is measured first, and once more after each loss, by a plain sync of the very weights that
    the new worker got: random weights have logits in which bfloat16 alone makes a tenth of a nat. A blow that
    comes too late breaks nothing and proves nothing: it is tried again, sooner."""
    size, good = options.sizes[0], True
    model = make_model(size, folder, eager=True)
    async with World(options, model, workers) as world:
        only = size in WEIGHTS_ONLY
        await world.start(actor=WeightsOnlyRank if only else BenchRank, stage=options.stages[0])
        async with turn(options.turns):
            usual = [await world.sync() for _ in range(3)][-1]
            await world.rank("perturb", 1e-3)
            await world.sync()
            probe = await world.sampled(1.0)
            before = await world.differences(probe, 1.0) if not only else {}
        result(what="loss", how="none, first", size=size, **before)
        for name in options.blows:
            number = BLOWS[name]

            async def strike(share: float, number: int = number, name: str = name) -> Blow:
                victim = world.pool._roster.all()[-1]
                pids = [victim.info.pid, *await victim.worker.engine_pids(timeout_seconds=10)]
                await world.rank("perturb", 1e-3)
                say(
                    f"{victim.id} ({pids}) will be {name} {share * usual:.3f} s into a sync "
                    f"that takes {usual:.3f} s"
                )
                seen = len(world.events)
                async with turn(options.turns):
                    seconds = await struck(
                        world.sync,
                        lambda: victim.state is WorkerState.SYNCING,
                        lambda: [os.kill(pid, number) for pid in reversed(pids)],
                        share * usual,
                    )
                if seconds is None:
                    return Blow(victim.id, broke=False)
                at = time.monotonic() - seconds
                await world.all_ready(workers, lost=victim.id)
                return Blow(victim.id, failed(world.events[seen:], victim.id), seconds, at)

            blow = await until_broken(strike, say)
            if blow is None:
                good = False
                result(what="loss", how=name, size=size, why="each sync ended before the blow", ok=False)
                say("no sync was broken: take a larger model (--sizes), whose transfer takes longer")
                continue
            joined = time.monotonic() - blow.at
            async with turn(options.turns):
                score = await asyncio.to_thread(world.learner.score, probe) if not only else None
                gap = await world.differences(probe, 1.0) if not only else {}
                await world.sync()
                plain = await world.differences(probe, 1.0) if not only else {}
            say(
                f"the learner went on {blow.seconds:.1f} s after the loss; "
                f"log-probs finite: {score is None or np.isfinite(score.logp).all()}"
            )
            more = gap["mean"] - plain["mean"] if gap else 0.0
            lent = [e for e in world.events if e["event"] == "weights_lent"]
            ok = blow.seconds < options.timeout + 15 and more < MORE_BY_A_LOSS
            good &= ok
            result(what="loss", how="none, the same weights", size=size, **plain)
            result(
                what="loss",
                how=name,
                size=size,
                goes_on_s=blow.seconds,
                joined_s=joined,
                lent_by_peer=bool(lent),
                more=more,
                ok=ok,
                **gap,
            )
        lent = [e for e in world.events if e["event"] == "weights_lent"]
        if workers > 1 and lent:
            result(what="peer or learner", size=size, loan_s=lent[-1].get("seconds"), sync_s=usual)
    return good


def table() -> None:
    columns = sorted({k for r in RESULTS for k in r if k not in ("what", "check")}, key=str)
    for what in dict.fromkeys(r["what"] for r in RESULTS):
        rows = [r for r in RESULTS if r["what"] == what]
        used = [c for c in columns if any(c in r for r in rows)]
        print(f"\n{what}: " + " | ".join(used))
        for r in rows:
            print(
                "  "
                + " | ".join(
                    f"{r[c]:.4g}" if isinstance(r.get(c), float) else str(r.get(c, "")) for c in used
                )
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=["agreement", "speed", "loss"])
    parser.add_argument("--model", type=Path, help="agreement: a Hugging Face folder; else random weights")
    parser.add_argument("--sizes", nargs="+", choices=list(SHAPES), default=None)
    parser.add_argument("--stages", nargs="+", type=int, default=[2, 3], help="ZeRO stages")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[1.0, 0.6])
    parser.add_argument("--syncs", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=10, help="speed: pairs of syncs, ours and bare")
    parser.add_argument("--workers", type=int, help="at most; default: all GPUs but one, three at most")
    parser.add_argument("--timeout", type=float, default=30.0, help="weight_sync.timeout_seconds")
    parser.add_argument("--backend", choices=["nccl", "gloo", "shared_memory", "auto"], default="nccl")
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--engine", choices=["vllm", "transformers"], default="vllm")
    parser.add_argument("--head-dtype", choices=["model", "float32"], default="model", help="of the engine")
    parser.add_argument("--blows", nargs="+", choices=list(BLOWS), default=list(BLOWS), help="loss: which")
    parser.add_argument("--eager", action="store_true", help="agreement: the engine compiles nothing")
    parser.add_argument("--turns", type=Path, metavar="FILE", help="time only while no other holds it")
    parser.add_argument("--place", type=Path, help="folder for the models; default: memory where they fit")
    parser.add_argument(
        "--no-bare", dest="bare", action="store_false", help="speed: without vLLM's own engine"
    )
    parser.add_argument("--memory", type=float, default=0.5, help="rollout.gpu_memory_utilization")
    parser.add_argument("--weights-only", action="store_true", help="speed: learner without an optimiser")
    parser.add_argument("--limit", type=float, default=570.0, help="seconds for everything")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    options.sizes = (
        options.sizes
        or {"agreement": ["0.5b"], "speed": ["0.5b", "1.5b", "3b", "7b"], "loss": ["3b"]}[options.part]
    )
    if lacks := no_room("gpu_sync"):
        return lacks
    faulthandler.dump_traceback_later(options.limit + 45, exit=True)
    # What Ray's processes get: this one has read neither.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    start_local_ray(
        include_dashboard=False,
        log_to_driver=False,
        num_cpus=6,  # Ray starts a process for each CPU that it is told of
    )
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if options.device == "gpu" and gpus < 2:
        print(
            f"two GPUs are needed, one for the learner and one for a worker; there are {gpus}",
            file=sys.stderr,
        )
        return 3
    workers = min(options.workers or 3, 3, gpus - 1 if options.device == "gpu" else 3)
    placement.RolloutWorker = BenchWorker
    # In memory where the largest model fits there twice.
    most = 2 * max(PARAMETERS_GB[size] for size in options.sizes) * 2**30
    roomy = os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > most
    place = options.place or ("/dev/shm" if roomy else None)
    if options.place:
        options.place.mkdir(parents=True, exist_ok=True)
    say(f"{gpus} GPUs, {workers} workers, {options.part}, backend {options.backend}")
    good = False
    try:
        with tempfile.TemporaryDirectory(prefix="unspiral-gpu-sync-", dir=place) as folder:
            part = {"agreement": agreement, "speed": speed, "loss": loss}[options.part]
            good = asyncio.run(asyncio.wait_for(part(options, Path(folder), workers), options.limit))
    except TimeoutError:
        print(f"not finished within {options.limit:g} s", flush=True)
    finally:
        table()
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(machine() | {"results": RESULTS}, indent=1) + "\n")
        stop_local_ray()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
