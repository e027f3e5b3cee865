"""Real runs that lose a learner rank, their driver, or their shape, and go on; see docs/reliability.md."""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import time

import psutil
import pytest
from end_to_end import events, finish, metrics, reproducible
from ray_cluster import RayCluster, alive
from runs import all_gone, ask, asked, at_step, kill, ray_processes, run_config, start, status, until

from services.likelihood.store.opening import open_store

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("reliability")


@pytest.fixture(scope="module")
def undisturbed(files, folder):
    code, out = finish(start(run_config(files, folder, "whole")))
    assert code == 0, out
    return folder / "whole"


def but_versions(step):
    """A restored learner's weights have a version of their own."""
    return {k: v for k, v in reproducible(step).items() if k != "policy_version"}


def sampled_by(run, step):
    """Policy versions of a step's actions."""
    lines = (run / "trajectories" / f"step_{step:06d}.jsonl").read_text(encoding="utf-8").splitlines()
    return {s["policy_version"] for line in lines for s in json.loads(line)["segments"] if s["by"] == "model"}


def test_a_run_whose_learner_rank_is_killed_finishes_with_the_same_metrics(files, folder, undisturbed):
    process, run = start(run_config(files, folder, "lost")), folder / "lost"
    at_step(run, 3, process)
    (rank,) = ray_processes(process, "ray::RankActor")
    os.kill(rank.pid, signal.SIGKILL)
    code, out = finish(process)
    assert code == 0, out
    assert [but_versions(s) for s in metrics(run)] == [but_versions(s) for s in metrics(undisturbed)]
    assert metrics(run)[-1]["attempt"] == 1 and asked(run) == asked(undisturbed)
    (lost,), (back,) = events(run, "learner_lost"), events(run, "learner_restored")
    assert "learner rank 0 of 1 died" in lost["reason"] and back["checkpoint"] in (
        "step_000002",
        "step_000004",
    )
    assert json.loads((run / "summary.json").read_text())["exit"] == 0 and "Traceback" not in out


@pytest.mark.chaos
def test_a_learner_that_is_stuck_is_found_out_by_its_timeout_and_restored(files, folder, undisturbed):
    config = run_config(files, folder, "stuck", learner={"step_timeout_seconds": 8})
    process, run = start(config), folder / "stuck"
    at_step(run, 3, process)
    (rank,) = ray_processes(process, "ray::RankActor")
    os.kill(rank.pid, signal.SIGSTOP)
    stopped = time.time()
    code, out = finish(process)
    assert code == 0, out
    (lost,) = events(run, "learner_lost")
    assert "within 8 s" in lost["reason"] and lost["time"] - stopped < 8 + 10
    assert not alive(rank.pid) and [but_versions(s) for s in metrics(run)] == [
        but_versions(s) for s in metrics(undisturbed)
    ]


@pytest.mark.chaos
def test_a_run_that_stands_still_prints_the_stacks_and_ends_with_1(files, folder):
    config = run_config(
        files, folder, "still", trainer={"stall_timeout_seconds": 8}, rollout={"deterministic": False}
    )
    process, run = start(config), folder / "still"
    at_step(run, 2, process)
    (worker,) = ray_processes(process, "ray::RolloutWorker")
    os.kill(worker.pid, signal.SIGSTOP)
    try:
        code, out = finish(process, 150)
    finally:
        if alive(worker.pid):
            worker.kill()
    assert code == 1, out
    assert (
        "does not answer (State: T (stopped))" in out
        and "worker w0.1" in out
        and "== learner rank 0 (pid" in out
    )
    assert out.strip().splitlines()[-1].startswith("unspiral: no progress for") and "Traceback" not in out
    assert json.loads((run / "summary.json").read_text())["exit"] == 1


def test_a_killed_driver_leaves_no_process_and_the_run_goes_on_in_another_shape(files, folder, undisturbed):
    """On a cluster that lives on. Resumed with two workers instead of one, two learner ranks instead of one,
    ZeRO 2 instead of 1."""
    with RayCluster(rollout=2, learner=2) as cluster:
        config, run = run_config(files, folder, "orphans"), folder / "orphans"
        head = psutil.Process(cluster.nodes[0].process.pid)
        process = start(config, environment=cluster.environment)
        at_step(run, 3, process)
        ours = [
            p
            for title in (
                "ray::RankActor",
                "ray::RolloutWorker",
                "ray::_RetrieverActor",
                "ray::_LikelihoodActor",
            )
            for p in ray_processes(head, title)
        ]
        assert len(ours) == 5  # two retrievers: one for evaluation
        kill(process)
        assert all_gone(ours, 30) == []
        before = metrics(run)
        shape = ("rollout.workers=2", "learner.ranks=2", "learner.zero_stage=2")
        process = start(config, "--resume", "latest", *shape, environment=cluster.environment)
        code, out = finish(process)
        assert code == 0, out
    after, whole = metrics(run), metrics(undisturbed)
    assert [s["step"] for s in after] == [1, 2, 3, 4, 5, 6] and after[-1]["attempt"] == 1
    assert [reproducible(s) for s in before] == [reproducible(s) for s in whole[: len(before)]]
    assert asked(run) == asked(undisturbed)  # an epoch of 10 questions ends in the middle of steps 3 and 5
    joins = [e["worker"] for e in events(run, "worker_join")]
    assert joins[0] == "w0.1" and sorted(joins[1:]) == ["w0.1", "w1.1"]
    # The first step after the resume as well: its workers hold the checkpoint's weights, under their version.
    for step in range(1, 7):
        assert sampled_by(run, step) == {step - 1}
    for step, other in zip(
        after[4:], whole[4:], strict=True
    ):  # other ranks and samplers: equal up to rounding, then to sampling
        assert step["policy_version"] == other["policy_version"]


def staleness_of(run):
    """By step, how many versions its oldest action is behind n - 1, the newest that step n can have."""
    return [s["step"] - 1 - min(sampled_by(run, s["step"])) for s in metrics(run)]


def asynchronous(files, folder, name, staleness, steps):
    return run_config(
        files,
        folder,
        name,
        rollout={"deterministic": False, "max_staleness": staleness},
        trainer={"steps": steps, "checkpoint_every": 0},
    )


def check_sampled_ahead(run, staleness):
    """Sampling went on while the learner updated: every step is whole, and no older than allowed."""
    steps = metrics(run)
    assert [s["step"] for s in steps] == list(range(1, len(steps) + 1))
    assert all(s["rollout/stale_dropped"] == 0 for s in steps)
    lags = staleness_of(run)
    assert max(lags) == staleness and min(lags) == 0
    assert "mode: token" in (run / "config.yaml").read_text()  # importance weights, by default
    assert len(asked(run)) == len(steps) * 12


def test_a_run_that_samples_ahead_goes_on_when_nobody_reads_its_output_and_hears_signals(files, folder):
    """Sampling goes on while the learner updates, and no signal cuts a step or its records short."""
    process, run = start(asynchronous(files, folder, "unread", 1, 10_000)), folder / "unread"
    fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)
    until(lambda: len(metrics(run)) > 35, process, 240)  # more lines than the pipe takes
    process.send_signal(signal.SIGTERM)
    assert process.wait(100) == 143
    assert json.loads((run / "summary.json").read_text())["exit"] == 143
    process.stdout.close()
    check_sampled_ahead(run, 1)


@pytest.mark.chaos
def test_a_run_whose_output_nobody_reads_comes_to_its_end(files, folder):
    process, run = (
        start(run_config(files, folder, "unread2", trainer={"steps": 36, "checkpoint_every": 0})),
        folder / "unread2",
    )
    fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)
    assert process.wait(200) == 0
    assert json.loads((run / "summary.json").read_text())["steps"] == 36
    process.stdout.close()


@pytest.mark.parametrize(
    ("override", "wanted", "within"),
    [
        ("rollout.workers=5", "CPU 6", 30),
        pytest.param("learner.ranks=99", "99 CPU", 10, marks=pytest.mark.chaos),
    ],
)
def test_more_than_the_cluster_has_is_one_line_with_demand_and_supply(
    files, folder, override, wanted, within
):
    process = start(run_config(files, folder, f"much-{wanted[:2]}"), override)
    lines = []
    seen = 0.0
    for line in process.stdout:
        lines.append(line)
        seen = seen or (time.monotonic() if line.startswith("starting a local Ray") else 0.0)
    assert process.wait(60) == 3, lines
    assert seen and time.monotonic() - seen < within, lines
    assert not [line for line in lines if "Traceback" in line or line.startswith("indexing")]
    assert (
        lines[-1].startswith(("unspiral: rollout.workers=5 and", "unspiral: learner.ranks=99 asks"))
        and wanted in lines[-1]
    )
    assert "the cluster has" in lines[-1]


@pytest.mark.chaos
def test_sampling_two_versions_ahead_goes_on_while_the_learner_updates(files, folder):
    code, out = finish(start(asynchronous(files, folder, "stale2", 2, 8)))
    assert code == 0, out
    assert len(metrics(folder / "stale2")) == 8
    check_sampled_ahead(folder / "stale2", 2)


def test_a_seeded_slice_of_chaos(files, folder):
    """Workers are killed, scaled and drained, the run's own services killed, at moments that a seed draws;
    all of it is `make test-chaos`."""
    draw, run = random.Random(int(os.environ.get("CHAOS_SEED", 0))), folder / "slice"
    rollout = {"deterministic": False, "workers": 2}
    config = run_config(
        files, folder, "slice", rollout=rollout, trainer={"steps": 5000, "checkpoint_every": 0}
    )
    deeds = ["kill", "scale", "drain", "services"]
    draw.shuffle(deeds)
    with RayCluster(rollout=3, learner=1) as cluster:
        process = start(config, environment=cluster.environment)
        at_step(run, 1, process)
        ready = lambda: [w for w in status(run)["workers"] if w["state"] == "ready"]  # noqa: E731
        for deed in deeds:
            there = until(lambda: ready() if len(ready()) > 1 else None, process, 60)
            time.sleep(draw.uniform(0, 0.5))
            if deed == "kill":
                victim = draw.choice(there)
                os.kill(victim["pid"], signal.SIGKILL)
                until(
                    lambda gone=victim["id"]: gone not in [w["id"] for w in status(run)["workers"]],
                    process,
                    60,
                )
            elif deed == "services":
                head = psutil.Process(cluster.nodes[0].process.pid)
                victims = [
                    p
                    for title in ("ray::_RetrieverActor", "ray::_LikelihoodActor")
                    for p in ray_processes(head, title)
                ]
                assert len(victims) == 3  # two retrievers: one for evaluation
                for victim in victims:
                    victim.kill()
            elif deed == "scale":
                ask(run, "/v1/workers/scale", {"n": 3})
            else:
                ask(run, f"/v1/workers/{draw.choice(there)['id']}/drain")
                ask(run, "/v1/workers/scale", {"n": 2})
        at_step(run, len(metrics(run)) + 3, process)
        process.send_signal(signal.SIGTERM)
        code, out = finish(process)
    assert code == 143 and "Traceback" not in out, out
    steps = [s["step"] for s in metrics(run)]
    assert steps == list(range(1, len(steps) + 1))
    assert sorted(asked(run)) == [
        f"{s:06d}-{p:04d}-{g:02d}" for s in steps for p in range(4) for g in range(3)
    ]
    store = open_store(f"sqlite:{run / 'likelihood.db'}")
    assert sorted(t.uid for s in steps for t in store.trajectories("slice", s)) == sorted(asked(run))
    store.close()
    assert (
        events(run, "worker_lost")
        and len(events(run, "control_scale")) == 2
        and len(events(run, "control_drain")) == 1
    )
