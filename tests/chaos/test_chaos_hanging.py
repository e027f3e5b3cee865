"""A worker that hangs (SIGSTOP) while it generates, while weights come, while it joins: found out within its
timeout, and the run goes on."""

from __future__ import annotations

import os
import signal
import time

import pytest
from end_to_end import events, finish, laboratory, metrics
from ray_cluster import RayCluster, alive
from runs import ask, asked, at_step, ray_processes, run_config, start, status, until

from services.rollout.pool.membership import HEARTBEAT_SECONDS, SILENCE_SECONDS

pytestmark = [pytest.mark.chaos, pytest.mark.ray, pytest.mark.timeout(1800)]

SYNC_SECONDS, START_SECONDS = 8, 40
SLACK = 10.0


@pytest.mark.parametrize("backend", ["gloo", "shared_memory"])
def test_a_worker_that_hangs_is_found_out_and_the_run_goes_on(folder, backend):
    files, name = laboratory(folder), f"hanging-{backend}"
    run = folder / name
    config = run_config(
        files,
        folder,
        name,
        rollout={"deterministic": False, "workers": 2, "start_timeout_seconds": START_SECONDS},
        weight_sync={"backend": backend, "timeout_seconds": SYNC_SECONDS},
        trainer={"steps": 2000, "checkpoint_every": 0},
    )
    with RayCluster(rollout=4, learner=1) as cluster:
        head = cluster.nodes[0].process
        process = start(config, environment=cluster.environment)
        at_step(run, 2, process)

        def ready():
            return [w for w in status(run)["workers"] if w["state"] == "ready"]

        def found_out(worker, within):
            """The worker leaves the pool in time, its process is gone, and steps go on with its successor."""
            began = time.monotonic()
            lost = until(
                lambda: [e for e in events(run, "worker_lost") if e["worker"] == worker["id"]],
                process,
                within,
            )
            print(
                f"{backend}: {worker['id']} lost after {time.monotonic() - began:.1f} s: "
                f"{lost[0]['reason'][:120]}"
            )
            until(lambda: not alive(worker["pid"]), process, 10)
            at_step(run, len(metrics(run)) + 2, process)
            until(lambda: len(ready()) == 2, process)

        # while it generates
        until(lambda: status(run)["stage"].endswith("rollout") and len(ready()) == 2, process)
        victim = until(ready, process)[0]
        os.kill(victim["pid"], signal.SIGSTOP)
        found_out(victim, SILENCE_SECONDS + 2 * HEARTBEAT_SECONDS + SLACK)

        # while weights come: the learner is held in its update until the worker has been stopped
        (rank,) = ray_processes(head, "ray::RankActor")

        def held() -> bool:
            rank.suspend()
            if status(run)["stage"].endswith("update") and status(run)["stage"].endswith("update"):
                return True
            rank.resume()
            time.sleep(0.1)
            return False

        until(held, process)
        victim = status(run)["workers"][-1]
        os.kill(victim["pid"], signal.SIGSTOP)
        rank.resume()
        found_out(victim, SYNC_SECONDS + SLACK)
        assert "weight_sync.timeout_seconds" in events(run, "sync_failed")[-1]["reason"]

        # while it joins
        before = {p.pid for p in ray_processes(head, "ray::RolloutWorker")}
        ask(run, "/v1/workers/scale", {"n": 3})
        (joiner,) = until(
            lambda: [p for p in ray_processes(head, "ray::RolloutWorker") if p.pid not in before], process
        )
        joiner.suspend()
        began = time.monotonic()
        until(lambda: events(run, "worker_start_failed"), process, START_SECONDS + SLACK)
        print(f"{backend}: joiner given up after {time.monotonic() - began:.1f} s")
        until(lambda: len(ready()) == 3, process)
        assert not alive(joiner.pid)
        process.send_signal(signal.SIGTERM)
        code, out = finish(process, 120)
    assert code == 143, out
    done = [s["step"] for s in metrics(run)]
    assert done == list(range(1, len(done) + 1)) and len(asked(run)) == 12 * len(done)
