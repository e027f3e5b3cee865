"""What the driver does by itself when something is lost, paused or stuck. Scripted steps on a real run
folder; see docs/reliability.md."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from checkpoint_files import fill
from end_to_end import ENVIRONMENT
from scripted_runs import Halting, checkpoints, listened, send
from test_trainer_monitor_actions import Pool, Scripted, events, system

from services.common.errors import UnspiralError
from services.common.processes import signals
from services.contracts import Action, Question, Trajectory
from trainer.learner.checkpoint import fault, step_folder, written_aside
from trainer.learner.group import LearnerError
from trainer.loop.keeping import restore
from trainer.loop.rollouts.sampling import RolloutBatch
from trainer.session import stopping, watchdog
from trainer.session.watchdog import watched


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(restore, "FIRST_BACK_OFF_SECONDS", 0.01)


class Losing(Scripted):
    """The learner is lost at the given counts of steps, after its weights have changed and before the step is
    recorded."""

    def __init__(self, system, lost_at):
        super().__init__(system, {})
        self.lost_at = lost_at

    async def one_step(self, step):
        if len(self.trace) + 1 in self.lost_at:
            self.trace.append((self.attempt, step))
            self.step, self.version = step, self.version + 1
            await self.sync()
            raise LearnerError("learner rank 0 of 1 died (update)")
        return await super().one_step(step)


def steps(made):
    return [
        (m["step"], m["attempt"]) for m in map(json.loads, made.folder.metrics_path.read_text().splitlines())
    ]


def test_a_lost_learner_is_restored_from_the_last_checkpoint_and_the_run_finishes(tmp_path):
    made = system(tmp_path)
    driver = Losing(made, {6})
    asyncio.run(driver.run())
    assert driver.trace == [(0, s) for s in range(1, 7)] + [(1, s) for s in range(5, 13)]
    assert steps(made) == [(s, 0) for s in range(1, 5)] + [(s, 1) for s in range(5, 13)]
    assert made.pool.versions == sorted(set(made.pool.versions))  # versions only go up
    (lost,) = [e for e in events(made) if e["event"] == "learner_lost"]
    (back,) = [e for e in events(made) if e["event"] == "learner_restored"]
    assert (lost["step"], lost["restore"], lost["of"]) == (6, 1, 3) and "rank 0 of 1 died" in lost["reason"]
    assert (back["step"], back["lost_at"], back["attempt"], back["checkpoint"]) == (4, 6, 1, "step_000004")
    assert made.learner.starts == 1 and driver.restores == 1


def test_a_learner_lost_before_the_first_checkpoint_begins_again_with_the_model(tmp_path):
    made = system(tmp_path)
    driver = Losing(made, {1, 2})
    asyncio.run(driver.run())
    assert driver.trace == [(0, 1), (1, 1)] + [(2, s) for s in range(1, 13)]
    assert steps(made) == [(s, 2) for s in range(1, 13)]


def test_a_learner_that_is_lost_again_and_again_ends_the_run(tmp_path):
    made = system(tmp_path)
    driver = Losing(made, set(range(3, 99)))
    with pytest.raises(LearnerError) as caught:
        asyncio.run(driver.run())
    assert caught.value.exit_code == 1 and made.learner.starts == 3 and checkpoints(made) == ["step_000002"]


def test_a_learner_that_does_not_start_again_counts_as_lost(tmp_path):
    made = system(tmp_path)

    def start():
        made.learner.starts += 1
        if made.learner.starts < 3:
            raise LearnerError("learner rank 0 of 1 found no place")

    made.learner.start = start
    driver = Losing(made, {6})
    asyncio.run(driver.run())
    assert made.learner.starts == 3 == driver.restores and steps(made)[-1] == (12, 1)


def test_a_signal_while_the_learner_is_restored_ends_the_run_and_saves_nothing_half_done(tmp_path):
    made = system(tmp_path)

    async def slow():
        await send(signal.SIGTERM)
        raise AssertionError("goes on after the signal")

    driver = Losing(made, {4})
    driver.cancel_ahead = lambda: slow() if driver.restores else asyncio.sleep(0)
    with pytest.raises(signals.Stopped):
        asyncio.run(listened(driver))
    assert checkpoints(made) == ["step_000002"]


def test_a_torn_checkpoint_of_the_same_step_is_written_anew(tmp_path):
    made = system(tmp_path)
    torn = step_folder(made.folder.path, 4)
    with written_aside(torn) as folder:
        fill(folder, {})
    (torn / "state.json").write_text("[]")
    assert fault(torn, checksums=False) is None and "does not match its checksum" in fault(torn)
    asyncio.run(Scripted(made, {}).run())
    assert fault(torn) is None and json.loads((torn / "state.json").read_text())["step"] == 4


def test_after_a_resume_the_workers_hold_the_checkpoints_weights_before_the_first_rollout(tmp_path):
    made = system(tmp_path)
    made.config.trainer.steps = 4
    asyncio.run(Scripted(made, {}).run())
    made.config.trainer.steps = 6
    made.pool.versions.clear()
    driver = Scripted(made, {})
    driver.load_state_dict(made.learner.load(step_folder(made.folder.path, 4)))
    whole = driver.one_step

    async def one_step(step):
        assert made.pool.versions[0] == 4  # synced once, before anything is sampled
        return await whole(step)

    driver.one_step = one_step
    asyncio.run(driver.run())
    assert made.pool.versions == [4, 5, 6]


def test_trajectories_that_are_too_old_are_dropped_and_counted():
    def trajectory(uid, *versions, group="g"):
        actions = [Action([1], [-0.5], v, "search", "x") for v in versions]
        return Trajectory(uid, group, Question("q", "?", ("a",), "lab"), [1], actions, "answer")

    made = [trajectory("a", 3, 4), trajectory("b", 2, 4), trajectory("c", 4, 4)]
    em = np.array([1.0, 0.0, 0.0])
    batch = RolloutBatch(5, made, np.array([1.0, 0.0, 0.5]), em, em > 0, {}, 1.0)
    kept = batch.drop_older_than(3)  # version 4 with max_staleness=1
    assert [t.uid for t in kept.trajectories] == ["a", "c"] and kept.rewards.tolist() == [1.0, 0.5]
    assert kept.counts == {"rollout/stale_dropped": 1.0, "reward/missing": 0.0}
    assert [a.policy_version for a in kept.trajectories[0].actions] == [3, 4]  # each action keeps its own
    pairs = [trajectory("a", 4), trajectory("b", 2), trajectory("c", 4, group="h")]
    last = replace(batch, trajectories=pairs).drop_older_than(3)
    assert [t.uid for t in last.trajectories] == ["c"], "what is left of a pair is no group born with one"
    assert last.counts == {"rollout/stale_dropped": 2.0, "reward/missing": 0.0}


def test_a_run_that_samples_ahead_samples_nothing_beyond_its_last_step(tmp_path):
    made = system(tmp_path, rollout={"max_staleness": 2})
    sampled, begun = [], []

    async def sample(step, on_done):
        sampled.append(step)
        return SimpleNamespace(step=step, drop_older_than=lambda version: (step, version))

    class Ahead(Scripted):
        async def one_step(self, step):
            assert await self.next_batch(step) == (step, self.version - 2)
            begun.append(list(sampled))
            return await super().one_step(step)

    driver = Ahead(made, {})
    driver.ahead.sampler = SimpleNamespace(sample=sample)
    asyncio.run(driver.run())
    assert [each[-1] for each in begun] == [min(step + 2, 12) for step in range(1, 13)]
    assert sampled == list(range(1, 13))


# -- pause


def paused_after(driver, step):
    """A driver that is paused in the middle of a step."""
    whole = driver.one_step

    async def one_step(n):
        if n == step:
            driver.resumed.clear()
        return await whole(n)

    driver.one_step = one_step
    return driver


def test_a_paused_run_ends_its_step_begins_no_other_and_goes_on(tmp_path):
    made = system(tmp_path)
    made.pool.wants_weights = False
    driver, seen = paused_after(Scripted(made, {}), 3), []

    async def run():
        running = asyncio.create_task(driver.run())
        while not driver.idle:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        seen.append(list(driver.trace))
        driver.resumed.set()
        await running

    asyncio.run(run())
    assert (
        seen == [[(0, s) for s in (1, 2, 3)]]
        and driver.trace == [(0, s) for s in range(1, 13)]
        and not driver.idle
    )


def test_a_signal_while_paused_saves_and_leaves(tmp_path):
    made = system(tmp_path)
    made.pool.wants_weights = False
    driver = paused_after(Scripted(made, {}), 3)

    def stage(name, step):
        if name == "paused":
            asyncio.get_running_loop().call_later(0.05, driver.stop.receive, signal.SIGTERM)

    driver.progress.stage = stage
    with pytest.raises(signals.Stopped) as caught:
        asyncio.run(listened(driver))
    assert caught.value.exit_code == 143 and checkpoints(made) == ["step_000002", "step_000003"]


# -- the watchdog


class Moving(Pool):
    """Each look at it sees progress until the driver halts: the steps before that may be slow on a busy
    machine, and are not what stands still."""

    driver = None
    _looks = 0

    @property
    def trajectories(self):
        self._looks += not getattr(self.driver, "halted", True)
        return self._looks

    @trajectories.setter
    def trajectories(self, count):
        self._looks = count


def watching(made, driver, limit):
    made.pool.__class__, made.pool.driver = Moving, driver
    made.config.trainer.stall_timeout_seconds = limit
    made.pool.trajectories, made.pool.problem, made.learner.where = 0, "no room for another worker", []
    made.pool.workers, made.pool.waits = list, list
    driver.progress.doing, driver.said = "update", []
    driver.progress.say = driver.said.append

    async def run():
        with driver.stop as stop, watched(driver):
            try:
                await driver.run()
            except asyncio.CancelledError:
                raise stop.error from None

    return run()


async def waits_for_ever(driver):
    await asyncio.get_running_loop().create_future()


def test_a_run_that_gets_no_further_says_what_it_waits_for_and_ends(tmp_path):
    made = system(tmp_path)
    driver = Halting(made, 3, waits_for_ever)
    began = time.monotonic()
    with pytest.raises(
        UnspiralError, match=r"no progress for \d+ s \(trainer.stall_timeout_seconds=0.5\) in update"
    ) as caught:
        asyncio.run(watching(made, driver, 0.5))
    assert caught.value.exit_code == 1 and time.monotonic() - began < 100
    text = (made.folder.path / "stall.txt").read_text()
    assert text.rstrip() in "\n".join(driver.said)
    for part in (
        "no room for another worker",
        "in waits_for_ever",
        "waits for <Future pending",
        "thread MainThread:",
    ):
        assert part in text
    assert [e["report"] for e in events(made) if e["event"] == "stalled"] == ["stall.txt"]
    assert checkpoints(made) == ["step_000002"]


def test_a_run_is_ended_also_where_the_stuck_part_cannot_be_asked(tmp_path):
    made = system(tmp_path)

    def away():
        raise RuntimeError("the pool is gone")

    async def waits_for_ever(driver):
        made.pool.workers = away
        (made.folder.path / "stall.txt").mkdir()  # and the report cannot be written
        await asyncio.Future()

    driver = Halting(made, 3, waits_for_ever)
    with pytest.raises(UnspiralError):
        asyncio.run(watching(made, driver, 0.5))
    assert "no more can be said (RuntimeError: the pool is gone)" in "\n".join(driver.said)
    assert "stall.txt cannot be written" in "\n".join(driver.said)


@pytest.mark.slow
def test_progress_and_pauses_keep_the_watchdog_quiet(tmp_path):
    made = system(tmp_path)
    made.pool.wants_weights = False

    async def slow(driver):
        for _ in range(10):
            await asyncio.sleep(0.2)
            made.pool.trajectories += 1
        driver.resumed.clear()
        asyncio.get_running_loop().call_later(3.0, driver.resumed.set)

    driver = Halting(made, 3, slow)
    asyncio.run(watching(made, driver, 2.0))
    assert driver.step == 12 and not (made.folder.path / "stall.txt").exists()


def test_a_call_of_the_learner_has_until_its_own_timeout_but_is_told_of(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "SLACK_SECONDS", 0.5)
    made = system(tmp_path)
    made.config.learner.step_timeout_seconds = 1.5

    async def update(driver):
        driver.on_learner.doing = "update"
        await asyncio.sleep(60)

    began = time.monotonic()
    with pytest.raises(UnspiralError):
        asyncio.run(watching(made, Halting(made, 3, update), 0.4))
    assert 2.0 < time.monotonic() - began < 30


def alone(script):
    """A script in a process of its own, with the tests' modules at hand; it hangs for 240 s unless it is
    ended."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True, timeout=230
    )
    assert time.monotonic() - began < 200, done.stderr
    return done


def test_a_run_whose_loop_is_stuck_is_ended_too(tmp_path):
    """In a process of its own, since it ends as it is."""
    script = f"""
import asyncio, pathlib, time
from test_reliability_driver import Halting, system, watching
from trainer.session import watchdog
watchdog.LEAVE_SECONDS = 0.5
async def stuck(driver): time.sleep(240)
made = system(pathlib.Path({str(tmp_path)!r}))
asyncio.run(watching(made, Halting(made, 3, stuck), 0.5))
"""
    done = alone(script)
    assert done.returncode == 1, done.stderr
    assert "no clean end within 0.5 s" in done.stderr
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["exit"] == 1
    assert (
        "time.sleep(240)" in (tmp_path / "r" / "stall.txt").read_text()
        or "in stuck" in (tmp_path / "r" / "stall.txt").read_text()
    )


def test_a_run_whose_loop_is_stuck_is_ended_also_where_its_summary_cannot_be_written(tmp_path):
    script = f"""
import asyncio, pathlib, time
from test_reliability_driver import Halting, system, watching
from trainer.session import watchdog
watchdog.LEAVE_SECONDS = 0.5
async def stuck(driver): time.sleep(240)
made = system(pathlib.Path({str(tmp_path)!r}))
def full(summary): raise OSError(28, "No space left on device")
made.folder.summary = full
asyncio.run(watching(made, Halting(made, 3, stuck), 0.5))
"""
    done = alone(script)
    assert done.returncode == 1, done.stderr
    assert "no clean end within 0.5 s" in done.stderr and "No space left on device" in done.stderr


def test_what_does_not_end_after_a_second_signal_is_left(tmp_path):
    """In a process of its own: what was started hangs while it is ended."""
    script = f"""
import asyncio, pathlib, signal, time
from scripted_runs import Halting, listened, send
from test_trainer_monitor_actions import system
from services.common.processes import signals
from trainer.session import stopping
stopping.LEAVE_SECONDS = 1.0
signals.REPEAT_SECONDS = 0.01
async def twice(driver):
    try:
        await send(signal.SIGTERM)
        await send(signal.SIGTERM)
    finally:
        time.sleep(240)
asyncio.run(listened(Halting(system(pathlib.Path({str(tmp_path)!r})), 3, twice)))
"""
    done = alone(script)
    assert done.returncode == 143, done.stderr
    assert stopping.LEAVE_SECONDS == 90.0


def test_a_signal_while_what_was_started_ends_leaves_now(tmp_path):
    """The third of a run that hangs: no child would outlive it."""
    script = f"""
import asyncio, os, pathlib, signal, time
from scripted_runs import Halting, listened, send
from test_trainer_monitor_actions import system
from services.common.processes import signals
signals.REPEAT_SECONDS = 1.5
async def thrice(driver):
    try:
        await send(signal.SIGTERM)
        await asyncio.sleep(1.8)
        await send(signal.SIGTERM)
        await send(signal.SIGTERM)  # the same one, passed on by a wrapper
        await asyncio.sleep(1)
    finally:
        print("still here", flush=True)
        await asyncio.sleep(1.8)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(240)
asyncio.run(listened(Halting(system(pathlib.Path({str(tmp_path)!r})), 3, thrice)))
"""
    done = alone(script)
    assert done.returncode == 143 and "still here" in done.stdout, done.stderr
