"""The likelihood store's cost: what a learner waits for, and how long a page of 10^7 stored actions takes.

    python benchmarks/monitoring/likelihood.py [--steps 1000] [--trajectories 2560] [--actions 4]
        [--stores sqlite redis]

Prints, for each store: seconds that making the records, `post_step` and `put_tokens` hold the learner up
(target: under .05 together), seconds until the service has stored the step, rows filled, and seconds of every
request that the live page makes for the whole run (target: under .2 together). The ratios are to an empty
route of the same server and to json.dumps of the same record. Everything runs on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "likelihood")]

from redis_server import RedisServer  # noqa: E402

from services.contracts import Action, Observation, Question, TokenBatch, Trajectory  # noqa: E402
from services.likelihood.client import LikelihoodClient  # noqa: E402
from services.likelihood.metrics.scored_step import ScoredStep  # noqa: E402
from services.likelihood.records import StepRecord, TrajectoryRecord  # noqa: E402
from services.likelihood.store.opening import open_store  # noqa: E402

BEST: list[float] = []
EXTRA_METRICS = {f"other/{i}": 0.5 for i in range(20)}


def batch(trajectories: int, actions: int, tokens: int = 30):
    question = Question("q", "who", ("a",), "b")
    made = []
    for i in range(trajectories):
        segments = []
        for k in range(actions):
            segments.append(
                Action(
                    [1] * tokens,
                    [-0.5] * tokens,
                    0,
                    "search" if k < actions - 1 else "answer",
                    "",
                    "q",
                    [str(i), "d"],
                )
            )
            if k < actions - 1:
                segments.append(Observation([2] * 60, "o"))
        made.append(Trajectory(f"u{i}", f"g{i // 5}", question, [3] * 50, segments, "answer"))
    return made, TokenBatch.of(made)


def timed(call, times: int = 1):
    """(median seconds, result). BEST collects the least, which a busy machine disturbs less."""
    took = []
    for _ in range(times):
        began = time.perf_counter()
        out = call()
        took.append(time.perf_counter() - began)
    BEST.append(min(took))
    return statistics.median(took), out


def serve(store: str):
    """The service as users run it, in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    code = (
        "from services.likelihood.cli import serve_likelihood; "
        f"serve_likelihood(store={store!r}, host='127.0.0.1', port=0, token_steps=8)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, env=environment
    )
    said = ""
    for line in process.stderr:
        if "service: " in line:
            return process, line.split("service: ")[1].split(" ")[0]
        said += line
    raise RuntimeError(f"the service did not start: {said[-2000:]}")


def measure(name: str, url: str, folder: Path, args) -> dict:
    rng = np.random.default_rng(0)
    trajectories, tokens = batch(args.trajectories, args.actions)
    logp = np.where(tokens.action_ids >= 0, -rng.exponential(0.3, len(tokens.token_ids)), 0.0).astype(
        np.float32
    )
    rewards, advantages = (
        [float(i % 2) for i in range(args.trajectories)],
        np.where(np.arange(args.trajectories) % 2, 1.0, -1.0),
    )
    tokens.logp_old = logp
    out = {"store": name, "trajectories": args.trajectories, "actions": args.actions}

    def scored() -> ScoredStep:
        """A new one for each measurement: it keeps its table of actions."""
        return ScoredStep(trajectories, tokens, rewards, advantages, entropy=0.3, logp_new=logp - 0.01)

    out["step_metrics_s"], metrics = timed(lambda: scored().metrics(), 3)
    BEST.clear()
    out["trajectory_records_s"], records = timed(lambda: scored().records(), 3)
    out["trajectory_records_best_s"] = BEST[-1]
    metrics |= EXTRA_METRICS

    def record(step: int) -> StepRecord:
        return StepRecord.model_construct(
            step=step, attempt=0, policy_version=step, metrics=metrics, trajectories=records
        )

    whole = [TrajectoryRecord(**r) for r in records]

    def checked(step: int) -> StepRecord:
        return StepRecord.model_construct(
            step=step, attempt=0, policy_version=step, metrics=metrics, trajectories=whole
        )

    out["json_dumps_s"], _ = timed(lambda: json.dumps({"trajectories": records}), 3)
    process, address = serve(url)
    try:
        with LikelihoodClient(address, spool_dir=folder / f"spool-{name}") as client:
            posts, puts, stored = [], [], []
            for step in range(5):
                posts.append(timed(lambda s=step: client.post_step("run", record(s)))[0])
                puts.append(timed(lambda s=step: client.put_tokens("run", s, tokens))[0])
                stored.append(timed(lambda: client.flush(60))[0])
        out |= {
            "post_step_s": statistics.median(posts),
            "put_tokens_s": statistics.median(puts),
            "until_stored_s": statistics.median(stored),
        }
        fill = open_store(url)
        began = time.perf_counter()
        for step in range(5, args.steps):
            fill.put_step("run", checked(step))
        out["fill_s_per_step"] = (time.perf_counter() - began) / max(1, args.steps - 5)
        info = fill.info("run")
        out["rows"] = info.trajectories * args.actions
        fill.close()
        with httpx.Client(base_url=address, timeout=120) as http:
            http.get("/v1/runs")
            out["empty_route_s"], _ = timed(lambda: http.get("/healthz"), 21)
            of_the_run = ("summary", "series?points=1200", "phase", "alarms", "events?limit=200")
            requests = ("/v1/runs", *(f"/v1/runs/run/{part}" for part in of_the_run))
            BEST.clear()
            parts = {path: timed(lambda p=path: http.get(p).raise_for_status(), 5)[0] for path in requests}
            out["page_s"], out["page_best_s"] = sum(parts.values()), sum(BEST)
            out["page_parts_s"] = {k: round(v, 4) for k, v in parts.items()}
            out["step_trajectories_s"], _ = timed(
                lambda: http.get(f"/v1/runs/run/steps/{args.steps // 2}/trajectories").raise_for_status(), 3
            )
    finally:
        process.terminate()
        process.wait(20)
    out["learner_held_s"] = out["trajectory_records_s"] + out["post_step_s"] + out["put_tokens_s"]
    out["learner_held_over_json_dumps"] = out["learner_held_s"] / out["json_dumps_s"]
    out["page_over_empty_route"] = out["page_s"] / out["empty_route_s"]
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--trajectories", type=int, default=2560)
    parser.add_argument("--actions", type=int, default=4)
    parser.add_argument("--stores", nargs="+", choices=("sqlite", "redis"), default=["sqlite", "redis"])
    args = parser.parse_args()
    print(
        f"machine: {platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}"
    )
    with tempfile.TemporaryDirectory(prefix="likelihood-bench-") as name:
        folder = Path(name)
        for store in args.stores:
            redis = RedisServer(folder / "redis") if store == "redis" else None
            try:
                result = measure(store, redis.url if redis else f"sqlite:{folder / 'l.db'}", folder, args)
            finally:
                if redis:
                    redis.stop()
            print(
                json.dumps(
                    {k: round(v, 4) if isinstance(v, float) else v for k, v in result.items()}, indent=1
                )
            )


if __name__ == "__main__":
    main()
