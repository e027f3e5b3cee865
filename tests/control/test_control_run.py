"""The control plane of a real run: status, scale, drain and pause by command line and REST, in mid-run;
SIGTERM while paused."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import contextmanager

import httpx
import pytest
import runs
from end_to_end import command, configuration, events, finish, metrics
from ray_cluster import AUTHENTICATION, RayCluster
from runs import until

pytestmark = [pytest.mark.chaos, pytest.mark.ray, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("control")


@pytest.fixture(scope="module")
def cluster():
    with RayCluster(rollout=3, learner=2) as made:
        yield made


def address(run, process):
    return json.loads(
        until(lambda: (run / "control.json").exists() and (run / "control.json").read_text(), process)
    )["url"]


def unspiral(*arguments, url):
    """A command against a run's control plane: exit status, output."""
    return runs.unspiral(*arguments, environment={"UNSPIRAL_CONTROL_URL": url})


@contextmanager
def gateway(ray_address):
    """`unspiral serve control`; its address."""
    process = command(
        "serve", "control", "--ray-address", ray_address, "--port", 0, environment=AUTHENTICATION
    )
    try:
        line = process.stdout.readline()
        assert line.startswith("control plane: http://127.0.0.1:"), line
        yield line.split()[2]
        process.send_signal(signal.SIGTERM)
        assert finish(process, 30)[0] == 143
    finally:
        process.kill()


def test_a_run_is_scaled_drained_paused_and_stopped_from_outside(cluster, files, folder):
    config = configuration(
        files,
        folder,
        "controlled",
        rollout={"engine": "transformers", "deterministic": False},
        trainer={"steps": 500, "checkpoint_every": 0},
        control={"port": 0},
    )
    process = command("train", "--config", config, environment=cluster.environment)
    run = folder / "controlled"
    try:
        url = address(run, process)
        status = lambda: httpx.get(url + "/v1/status", timeout=60).json()  # noqa: E731
        ready = lambda n: sum(w["state"] == "ready" for w in status()["workers"]) == n  # noqa: E731
        assert status()["state"] in ("starting", "running")
        until(lambda: metrics(run), process)

        # 1 -> 3 by the command line, -> 2 by REST; the new ones take part
        assert unspiral("workers", "scale", 3, url=url) == (0, "3 workers wanted, before 1\n")
        until(lambda: ready(3), process)
        until(lambda: min(w["trajectories"] for w in status()["workers"]) > 0, process)
        code, out = unspiral("workers", "list", url=url)
        assert code == 0 and all(f"w{i}.1" in out for i in range(3))
        answer = httpx.post(url + "/v1/workers/scale", json={"n": 2})
        assert answer.status_code == 202 and answer.json()["target"] == 2
        until(lambda: len(status()["workers"]) == 2, process)
        code, out = unspiral("workers", "drain", "w1.1", url=url)
        assert (code, out) == (0, "w1.1 drains; 1 worker wanted\n")
        until(lambda: [w["id"] for w in status()["workers"]] == ["w0.1"], process)
        assert unspiral("workers", "drain", "w9.9", url=url)[0] == 2

        # more than the cluster could hold: refused at once, with demand against supply
        code, out = unspiral("workers", "scale", 99, url=url)
        assert code == 3 and "99 rollout workers ask for rollout 99; the cluster has rollout 3" in out
        assert status()["target"] == 1

        # a gateway in another process finds the run, and passes on what it is asked
        with gateway(cluster.address) as other:
            assert unspiral("status", url=other)[1].startswith(
                "run:              controlled, attempt 0: running"
            )
            assert unspiral("workers", "scale", 99, url=other)[0] == 3
            assert unspiral("workers", "drain", "w9.9", url=other)[0] == 2

        # all: as many as there is room for, and a node that joins brings more
        assert unspiral("workers", "scale", "all", url=url)[0] == 0
        assert status()["follows_cluster"] is True and status()["target"] == 3
        node = cluster.join(rollout=1)
        until(lambda: ready(4), process)
        node.end()
        until(lambda: status()["target"] == 3 and ready(3), process)

        code, out = unspiral("status", url=url)
        assert code == 0
        for part in (
            "controlled, attempt 0: running",
            "of 500",
            "policy version:",
            "reward:",
            "tokens/s:",
            "last sync:",
            "w0.1",
        ):
            assert part in out, out
        now = status()
        assert now["retriever"]["reachable"] and now["store"]["reachable"] and len(now["rewards"]) >= 1
        assert "unspiral_control_workers_target 3.0" in httpx.get(url + "/metrics").text

        # pause: the step in hand ends, no other begins; then on, then SIGTERM while paused
        assert unspiral("pause", url=url)[0] == 0
        until(lambda: status()["state"] == "paused", process)
        done = len(metrics(run))
        time.sleep(3)
        assert (
            len(metrics(run)) == done == status()["step"]
            and sum(w["outstanding_tokens"] for w in status()["workers"]) == 0
        )
        assert unspiral("resume", url=url)[0] == 0
        until(lambda: len(metrics(run)) > done, process)
        assert unspiral("pause", url=url)[0] == 0
        until(lambda: status()["state"] == "paused", process)
        done = status()["step"]
        process.send_signal(signal.SIGTERM)
        code, out = finish(process, 60)
        assert code == 143, out
        assert "Traceback" not in out
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()
    assert [p.name for p in (run / "checkpoints").glob("step_*")] == [f"step_{done:06d}"]
    assert [s["step"] for s in metrics(run)] == list(range(1, done + 1))
    assert [(e["asked"], e["target"], e["before"]) for e in events(run, "control_scale")] == [
        (3, 3, 1),
        (2, 2, 3),
        ("all", 3, 1),
    ]
    assert len(events(run, "pause")) == 2 and len(events(run, "pause_over")) == 1
    assert not (run / "control.json").exists()
    assert unspiral("status", url=url)[0] == 3
