"""Workers in mid-run, 1 -> 4 -> 2 by command line and REST: all take part, and the speed follows.

Each worker gets a quarter of a core, where this user may make control groups: workers stand for machines, and
a laptop has few cores."""

from __future__ import annotations

import json
import os
import signal
import statistics

import pytest
from cpu_shares import cpu_shares
from end_to_end import events, finish, laboratory, metrics
from ray_cluster import RayCluster
from runs import ask, at_step, run_config, start, status, unspiral, until

pytestmark = [pytest.mark.chaos, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(1800)]

SHARE = 0.25
STEPS = 6
"""Measured with each number of workers."""


def test_the_speed_follows_the_number_of_workers(folder, amount):
    files, run, table = laboratory(folder), folder / "scaled", {}
    rollout = {
        "engine": amount["engine"],
        "deterministic": False,
        "prompts_per_step": 32,
        "group_size": 4,
        "max_response_tokens": 24,
        "max_turns": 3,
    }
    config = run_config(
        files, folder, "scaled", rollout=rollout, trainer={"steps": 2000, "checkpoint_every": 0}
    )
    with RayCluster(rollout=4, learner=1) as cluster, cpu_shares(SHARE) as shares:
        process = start(config, environment=cluster.environment)
        until(lambda: (run / "control.json").exists(), process)
        url = json.loads((run / "control.json").read_text())["url"]
        at_step(run, 2, process)

        def measured(n: int) -> None:
            until(
                lambda: (
                    [w["state"] for w in status(run)["workers"]].count("ready")
                    == n
                    == len(status(run)["workers"])
                ),
                process,
                300,
            )
            if shares:
                for worker in status(run)["workers"]:
                    shares.give(worker["pid"])
            begin = len(metrics(run)) + 1  # the step in hand began with other workers
            at_step(run, begin + STEPS, process)
            table[n] = statistics.median(
                s["rollout/tokens_per_s"] for s in metrics(run)[begin : begin + STEPS]
            )
            by = [
                json.loads(line)["worker"]
                for line in (run / "trajectories" / f"step_{begin + STEPS:06d}.jsonl")
                .read_text()
                .splitlines()
            ]
            assert len(set(by)) == n, by

        measured(1)
        assert unspiral("workers", "scale", 4, environment={"UNSPIRAL_CONTROL_URL": url}) == (
            0,
            "4 workers wanted, before 1\n",
        )
        measured(4)
        assert ask(run, "/v1/workers/scale", {"n": 2})["target"] == 2
        measured(2)
        process.send_signal(signal.SIGTERM)
        code, out = finish(process, 120)
    assert code == 143, out
    print(
        f"rollout tokens/s by workers, {amount['engine']}, "
        f"{f'{SHARE} cores each' if shares else f'{os.cpu_count()} cores in all'}: {table}; "
        f"as ratios: { {n: round(v / table[1], 2) for n, v in table.items()} }"
    )
    assert not events(run, "trajectory_retry")
    if shares or os.cpu_count() > 4:
        assert table[4] > 2 * table[1] and table[2] > 1.4 * table[1]
