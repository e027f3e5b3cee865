"""The network between the learner and one rollout worker is cut: the worker's node is a network namespace
whose link goes down. Needs root."""

from __future__ import annotations

import signal
import time

import pytest
from end_to_end import events, finish, laboratory, metrics
from other_host import ip, other_host
from ray_cluster import RayCluster
from runs import asked, at_step, run_config, start, status, until

SYNC_SECONDS = 8
NOTICED_SECONDS = 60
"""Ray's own health checks may come first (some 15 s), else the sync's timeout or a ping's."""


@pytest.fixture
def host():
    with other_host("unspiral-cut", "10.78.0") as made:
        yield made


@pytest.mark.chaos
@pytest.mark.ray
@pytest.mark.timeout(1200)
def test_a_worker_that_the_network_cuts_off_is_given_up_and_the_run_goes_on(folder, host):
    files, run = laboratory(folder), folder / "cut"
    config = run_config(
        files,
        folder,
        "cut",
        rollout={"deterministic": False, "workers": "all"},
        weight_sync={"backend": "gloo", "timeout_seconds": SYNC_SECONDS},
        trainer={"steps": 2000, "checkpoint_every": 0},
    )
    with RayCluster(at=host.here, rollout=1, learner=1) as cluster:
        cluster.join(at=host.there, host=host.name, rollout=1)
        # This machine's name leads to 127.0.0.1 in both; gloo is told the way.
        process = start(config, environment=cluster.environment | {"GLOO_SOCKET_IFNAME": host.link})
        until(lambda: (run / "control.json").exists(), process)
        until(lambda: sum(w["state"] == "ready" for w in status(run)["workers"]) == 2, process, 180)
        at_step(run, len(metrics(run)) + 3, process)
        synced = status(run)["version"]
        assert {w["version"] for w in status(run)["workers"]} <= {synced - 1, synced, synced + 1}
        ip("link", "set", host.link, "down")
        cut = time.monotonic()
        lost = until(lambda: events(run, "worker_lost"), process, NOTICED_SECONDS)
        print(f"cut off: lost after {time.monotonic() - cut:.1f} s: {lost[0]['reason'][:150]}")
        at_step(run, len(metrics(run)) + 3, process)
        print(f"cut off: three steps more after {time.monotonic() - cut:.1f} s")
        ip("link", "set", host.link, "up")
        at_step(run, len(metrics(run)) + 2, process)
        process.send_signal(signal.SIGTERM)
        code, out = finish(process, 120)
    assert code == 143, out
    done = [s["step"] for s in metrics(run)]
    assert done == list(range(1, len(done) + 1)) and len(asked(run)) == 12 * len(done)
