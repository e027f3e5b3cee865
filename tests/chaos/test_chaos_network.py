"""The network between the learner and one rollout worker is cut: the worker's node is a network namespace whose link goes down. Needs root."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time

import pytest
from end_to_end import events, finish, laboratory, metrics
from ray_cluster import RayCluster
from runs import asked, at_step, run_config, start, status, until

HOST, LINK, HERE, THERE = "unspiral-cut", "unspiral-cut0", "10.78.0.1", "10.78.0.2"
SYNC_SECONDS = 8
NOTICED_SECONDS = 60
"""Ray's own health checks may come first (some 15 s), else the sync's timeout or a ping's."""


def ip(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)


@pytest.fixture
def host():
    if os.geteuid() or not shutil.which("ip") or ip("netns", "add", HOST).returncode:
        pytest.skip("needs root and network namespaces")
    try:
        ip("link", "add", LINK, "type", "veth", "peer", "name", LINK, "netns", HOST)
        ip("addr", "add", f"{HERE}/24", "dev", LINK)
        ip("link", "set", LINK, "up")
        for words in (
            ("addr", "add", f"{THERE}/24", "dev", LINK),
            ("link", "set", LINK, "up"),
            ("link", "set", "lo", "up"),
        ):
            ip("-n", HOST, *words)
        yield HOST
    finally:
        ip("link", "del", LINK)
        ip("netns", "del", HOST)


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
    with RayCluster(at=HERE, rollout=1, learner=1) as cluster:
        cluster.join(at=THERE, host=host, rollout=1)
        # This machine's name leads to 127.0.0.1 in both; gloo is told the way.
        process = start(config, environment=cluster.environment | {"GLOO_SOCKET_IFNAME": LINK})
        until(lambda: (run / "control.json").exists(), process)
        until(lambda: sum(w["state"] == "ready" for w in status(run)["workers"]) == 2, process, 180)
        at_step(run, len(metrics(run)) + 3, process)
        synced = status(run)["version"]
        assert {w["version"] for w in status(run)["workers"]} <= {synced - 1, synced, synced + 1}
        ip("link", "set", LINK, "down")
        cut = time.monotonic()
        lost = until(lambda: events(run, "worker_lost"), process, NOTICED_SECONDS)
        print(f"cut off: lost after {time.monotonic() - cut:.1f} s: {lost[0]['reason'][:150]}")
        at_step(run, len(metrics(run)) + 3, process)
        print(f"cut off: three steps more after {time.monotonic() - cut:.1f} s")
        ip("link", "set", LINK, "up")
        at_step(run, len(metrics(run)) + 2, process)
        process.send_signal(signal.SIGTERM)
        code, out = finish(process, 120)
    assert code == 143, out
    done = [s["step"] for s in metrics(run)]
    assert done == list(range(1, len(done) + 1)) and len(asked(run)) == 12 * len(done)
