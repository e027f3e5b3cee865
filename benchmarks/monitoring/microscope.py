"""The microscope's cost: what a learner waits for, the page over many stored trajectories, bytes of each.

    python benchmarks/monitoring/microscope.py [--stored 1000000] [--per-step 1000] [--stores sqlite redis]

For each store: bytes per stored trajectory, and seconds of the requests that the page of a step makes
(median and slowest of 20 steps at random; target: under .2 s together). `hold_up`: what making the records
of a step of 2,560 trajectories and handing them over holds the learner up, with the sample and without it, in
turns (target: a ratio of at most 1.1). `ratio_of_pairs` is the median, least and largest of neighbours; `cpu`
the same of the processor time of the thread that is held up, which other work on the machine disturbs less.
Stored trajectories have 150 tokens, two searches and three documents each.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "likelihood")]

from redis_server import RedisServer  # noqa: E402

from benchmarks.monitoring.likelihood import batch, serve  # noqa: E402
from services.likelihood.client import LikelihoodClient  # noqa: E402
from services.likelihood.metrics.scored_step import ScoredStep  # noqa: E402
from services.likelihood.microscope.building import Lens, Slide  # noqa: E402
from services.likelihood.microscope.choice import chosen_rows  # noqa: E402
from services.likelihood.microscope.packing import PackedSample, packed  # noqa: E402
from services.likelihood.microscope.record import SampledTrajectory, Scoring  # noqa: E402
from services.likelihood.records import StepRecord  # noqa: E402
from services.likelihood.store.opening import open_store  # noqa: E402
from services.likelihood.store.redis import samples as redis_samples  # noqa: E402
from services.likelihood.store.sqlite import samples as sqlite_samples  # noqa: E402

GROUP = 8
WORDS = [f" word{i}" for i in range(5000)]
LENS = Lens(lambda ids: "".join(WORDS[i % 5000] for i in ids), lambda trajectory: Scoring())


def sample(rng: np.random.Generator, step: int, row: int) -> SampledTrajectory:
    """A trajectory of 150 tokens in three actions, with two searches of three documents of 600 characters."""

    def written(kind: str) -> dict[str, Any]:
        before = -rng.exponential(0.3, 50)
        found = [
            {"id": f"d{n}", "title": f"title {n}", "text": "".join(rng.choice(WORDS, 75))}
            for n in rng.integers(0, 10**6, 3)
        ]
        return {
            "by": "model",
            "kind": kind,
            "tokens": rng.choice(WORDS, 50).tolist(),
            "logp_before": before.tolist(),
            "logp_after": np.minimum(before - rng.normal(0.01, 0.05, 50), 0).tolist(),
            "logp_sampler": before.tolist(),
            "held": list(range(0, 50, 3)),
            "documents": found if kind == "search" else None,
        }

    segments: list[dict[str, Any]] = []
    for kind in ("search", "search", "answer"):
        made = written(kind)
        segments.append(made)
        if made["documents"]:
            text = " ".join(d["text"] for d in made["documents"])
            segments.append({"by": "environment", "text": text, "tokens": 225})
    right = row % GROUP == 0
    return SampledTrajectory.model_validate(
        {
            "uid": f"{step:06d}-{row:04d}",
            "group": f"{step:06d}-{row // GROUP:04d}",
            "question": "who founded the guild of weavers of the town on the river?",
            "data_source": "nq",
            "reward": float(right),
            "right": right,
            "advantage": 1.0 if right else -0.1,
            "finish": "answer",
            "valid": True,
            "segments": segments,
        }
    )


def fill(url: str, stored: int, per_step: int) -> int:
    """Store trajectories by the stores' own statements, a step at a time; the bodies of one step stand in for
    all. Returns the bytes of one head and body on the average."""
    rng = np.random.default_rng(0)
    rows = [packed(sample(rng, 0, row)) for row in range(per_step)]
    store: Any = open_store(url, sample_steps=10**9)
    steps = stored // per_step
    store.put_step("run", StepRecord(step=0))
    for step in range(steps):
        named = [renamed(row, step) for row in rows]
        if url.startswith("redis"):
            at = store._keys("run")
            place = at("samples", step)
            store._redis.hset(place, mapping=redis_samples._fields(named))
            held = [0, len(named), sum(row.size for row in named)]
            store._redis.hset(at("samples"), step, json.dumps(held))
        else:
            with store._file.writing() as db:
                sqlite_samples.insert(db, "run", store._id(db, "run"), step, 0, named)
        if step % 100 == 99:
            print(f"{url}: {(step + 1) * per_step:,} stored", file=sys.stderr, flush=True)
    store.close()
    return sum(row.size for row in rows) // per_step


def renamed(row: PackedSample, step: int) -> PackedSample:
    """The same trajectory in another step. Its body keeps its old names: nothing here reads them."""
    old, new = b'"000000-', f'"{step:06d}-'.encode()
    head = row.head.replace(old, new)
    return replace(row, uid=f"{step:06d}-{row.uid[7:]}", group=f"{step:06d}-{row.group[7:]}", head=head)


def pages(url: str, steps: int, per_step: int) -> dict[str, float]:
    """Seconds of what the page of a step asks for."""
    process, address = serve(url)
    rng = np.random.default_rng(1)
    whole: list[float] = []
    try:
        with httpx.Client(base_url=address, timeout=60) as http:
            for step in rng.integers(0, steps, 21).tolist():
                group = f"{step:06d}-{int(rng.integers(0, per_step // GROUP)):04d}"
                began = time.perf_counter()
                http.get(f"/runs/run/steps/{step}").raise_for_status()
                http.get(f"/v1/runs/run/steps/{step}/samples?order=alarm&rule=likelihood").raise_for_status()
                found = http.get(f"/v1/runs/run/steps/{step}/samples/full", params={"group": group})
                assert len(found.raise_for_status().json()) == GROUP
                whole.append(time.perf_counter() - began)
            searched = time.perf_counter()
            http.get(
                f"/v1/runs/run/steps/{steps // 2}/samples", params={"text": "word77 "}
            ).raise_for_status()
            searched = time.perf_counter() - searched
            status = Path(f"/proc/{process.pid}/status").read_text()
            peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    finally:
        process.terminate()
        process.wait(10)
    whole = whole[1:]  # the first opens the store
    out = {"page_median_s": statistics.median(whole), "page_slowest_s": max(whole), "text_search_s": searched}
    return {name: round(seconds, 4) for name, seconds in out.items()} | {"peak_mib": peak >> 10}


def hold_up(folder: Path, rounds: int) -> dict[str, Any]:
    """Seconds that a step of 2,560 trajectories holds the learner up, without the sample and with it."""
    trajectories, tokens = batch(2560, 4)
    rng = np.random.default_rng(0)
    mask = tokens.action_ids >= 0
    logp = np.where(mask, -rng.exponential(0.3, mask.size), 0.0).astype(np.float32)
    tokens.logp_old = logp
    rewards = [float(i % 2) for i in range(2560)]
    advantages = np.where(np.arange(2560) % 2, 1.0, -1.0)
    process, address = serve(f"sqlite:{folder / 'hold.db'}")
    took: dict[bool, list[float]] = {False: [], True: []}
    cpu: dict[bool, list[float]] = {False: [], True: []}
    try:
        with LikelihoodClient(address, spool_dir=folder / "spool") as client:
            for step in range(2 * rounds):
                scored = ScoredStep(
                    trajectories, tokens, rewards, advantages, entropy=0.3, logp_new=logp - 0.01
                )
                scored.metrics()
                sampled = bool(step % 2)
                began = time.perf_counter()
                busy = time.thread_time()
                rows = chosen_rows(scored, 4, ["likelihood"]) if sampled else []
                slide = Slide.of(scored, rows, None, None) if rows else None
                record = StepRecord.model_construct(
                    step=step, attempt=0, policy_version=0, metrics={}, trajectories=scored.records()
                )
                client.post_step("run", record)
                client.put_tokens("run", step, tokens)
                if slide:
                    client.post_samples("run", step, slide, LENS)
                took[sampled].append(time.perf_counter() - began)
                cpu[sampled].append(time.thread_time() - busy)
                client.flush(60)
    finally:
        process.terminate()
        process.wait(10)

    def pairs(of: dict[bool, list[float]]) -> list[float]:
        ratios = sorted(s / w for w, s in zip(of[False], of[True], strict=True))
        return [round(r, 3) for r in (statistics.median(ratios), ratios[0], ratios[-1])]

    without, with_sample = (statistics.median(took[sampled]) for sampled in (False, True))
    return {
        "hold_up_without_s": round(without, 5),
        "hold_up_with_s": round(with_sample, 5),
        "ratio": round(with_sample / without, 3),
        "ratio_of_pairs": pairs(took),
        "cpu_without_s": round(statistics.median(cpu[False]), 5),
        "cpu_with_s": round(statistics.median(cpu[True]), 5),
        "cpu_ratio_of_pairs": pairs(cpu),
        "ratio_of_least": round(min(took[True]) / min(took[False]), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stored", type=int, default=1_000_000)
    parser.add_argument("--per-step", type=int, default=1000)
    parser.add_argument("--stores", nargs="*", default=["sqlite"], choices=["sqlite", "redis"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--folder", type=Path, help="Where the stores are made; a temporary one if left out.")
    arguments = parser.parse_args()
    about = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    print(json.dumps(about | {"python": platform.python_version(), "httpx": httpx.__version__}))
    with tempfile.TemporaryDirectory(dir=arguments.folder) as made:
        folder = Path(made)
        print(json.dumps(hold_up(folder, arguments.rounds)), flush=True)
        for name in arguments.stores:
            (folder / "redis").mkdir(exist_ok=True)
            redis = RedisServer(folder / "redis") if name == "redis" else None
            url = redis.url if redis else f"sqlite:{folder / 'l.db'}"
            packed_bytes = fill(url, arguments.stored, arguments.per_step)
            out: dict[str, Any] = {"store": name, "stored": arguments.stored, "packed_bytes": packed_bytes}
            if not redis:
                size = sum(file.stat().st_size for file in folder.glob("l.db*"))
                out["file_bytes_per_trajectory"] = size // arguments.stored
            print(
                json.dumps(out | pages(url, arguments.stored // arguments.per_step, arguments.per_step)),
                flush=True,
            )
            if redis:
                redis.stop()


if __name__ == "__main__":
    main()
