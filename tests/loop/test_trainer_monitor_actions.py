"""The driver carries out what the monitor wants: rollback, stop, and the attempts that follow. Scripted steps
on a real run folder."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest
from checkpoint_files import fill

from services.common.errors import UnspiralError
from services.contracts import WeightUpdate
from services.likelihood.monitor.actions import MonitorAction
from services.weight_sync.base import WeightSyncError
from trainer.config.schema import parse_config
from trainer.learner.checkpoint import drop_after, latest, step_folder, written_aside
from trainer.loop.driver import Driver
from trainer.loop.run.run_folder import RunFolder
from trainer.session.stopping import StopSignals


class Learner:
    """Saves and loads the driver's state as real checkpoints; has no weights."""

    where = ()

    def __init__(self):
        self.starts = 0
        self.model_path = ""

    def start(self):
        self.starts += 1

    def close(self):
        """No processes."""

    def offer_weights(self, version, receivers):
        return WeightUpdate(version, "none", None, 0)

    def send_weights(self):
        """Nothing to send."""

    def save(self, path, state):
        with written_aside(path) as folder:
            fill(folder, state)

    def load(self, path):
        return json.loads((path / "state.json").read_text())


class Pool:
    """Takes versions as the real one does: the same or a lower one is refused."""

    def __init__(self):
        self.versions, self.trajectories = [], 0

    async def receivers(self, version):
        return []

    def workers(self):
        return []

    async def sync(self, update):
        version = update.version
        if self.versions and version <= self.versions[-1]:
            raise WeightSyncError(
                f"version {version} is not newer than {self.versions[-1]}: versions only go up"
            )
        self.versions.append(version)


class Scripted(Driver):
    """Steps do nothing but count; at the given calls the monitor wants something."""

    def __init__(self, system, wants):
        progress = SimpleNamespace(stage=lambda *a: None, say=lambda text: None, trajectory=None, doing="")
        super().__init__(system, progress, StopSignals(progress.say))
        self.wants, self.trace = wants, []

    async def one_step(self, step):
        self.step, self.version = step, self.version + 1
        await self.sync()
        self.trace.append((self.attempt, step))
        self.system.folder.metrics({"step": step, "attempt": self.attempt})
        action = self.wants.get(len(self.trace))
        if action:
            self.actions.changes += 1
            self.event(action.event())
        return action


def system(tmp_path, **changes):
    raw = {
        "run": {"name": "r", "dir": str(tmp_path)},
        "model": {"path": str(tmp_path / "model")},
        "data": {"train": "t"},
        "retriever": {"url": "http://x"},
        "trainer": {"steps": 12, "checkpoint_every": 2, "keep_checkpoints": 9, "eval_at_ends": False},
        "monitor": {"action": "rollback"},
        "control": {"enabled": False},
    }
    config = parse_config(raw | changes)
    model = tmp_path / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text('{"model_type": "qwen3"}')
    folder = RunFolder(config)
    folder.open(resume=False)
    posted = []
    store = SimpleNamespace(
        keep=lambda timeout: None,
        post_event=lambda run, event: posted.append(event.kind),
        post_about=lambda run, about: None,
    )
    cursor = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
    return SimpleNamespace(
        config=config,
        folder=folder,
        store=store,
        cursor=cursor,
        learner=Learner(),
        pool=Pool(),
        reward=None,
        metrics={},
        identity={},
        eval_questions=[],
        posted=posted,
    )


def rollback(step, before):
    return MonitorAction(step, "rollback", False, 2.0, before, "it falls")


def events(made):
    return [json.loads(line) for line in (made.folder.path / "events.jsonl").read_text().splitlines()]


def test_a_rollback_goes_on_from_before_the_fall_as_the_next_attempt(tmp_path):
    made = system(tmp_path)
    driver = Scripted(made, {9: rollback(9, 6)})
    asyncio.run(driver.run())
    assert driver.trace == [(0, s) for s in range(1, 10)] + [(1, s) for s in range(5, 13)]
    assert driver.actions.lr_scale == 0.5  # what was tried is remembered
    lines = [json.loads(line) for line in made.folder.metrics_path.read_text().splitlines()]
    assert [m["step"] for m in lines] == list(range(1, 13)) and [m["attempt"] for m in lines] == [0] * 4 + [
        1
    ] * 8
    assert made.posted == ["monitor_rollback", "monitor_rolled_back"]
    assert made.pool.versions == [
        *range(10),
        10,
        *range(11, 19),
    ]  # 10 is step 4's weights again, under a version of their own
    assert [e["event"] for e in events(made) if e["event"].startswith(("monitor", "resume"))] == [
        "monitor_rollback",
        "resume",
        "monitor_rolled_back",
    ]
    assert (
        json.loads((step_folder(made.folder.path, 8) / "state.json").read_text())["attempt"] == 1
    )  # written anew


def test_a_run_that_is_killed_after_a_rollback_remembers_what_was_tried(tmp_path):
    class Killed(Scripted):
        async def one_step(self, step):
            if self.attempt:
                raise RuntimeError("killed")
            return await super().one_step(step)

    made = system(tmp_path)
    with pytest.raises(RuntimeError, match="killed"):
        asyncio.run(Killed(made, {9: rollback(9, 6)}).run())
    resumed = Scripted(made, {})
    resumed.load_state_dict(made.learner.load(latest(made.folder.path)))
    assert (resumed.step, resumed.attempt, resumed.actions.changes, resumed.actions.lr_scale) == (
        4,
        2,
        1,
        0.5,
    )


def test_without_a_checkpoint_from_before_the_fall_the_run_goes_on_and_says_so(tmp_path):
    made = system(tmp_path)
    driver = Scripted(made, {5: rollback(5, 2)})
    asyncio.run(driver.run())
    assert driver.trace == [(0, s) for s in range(1, 13)]
    assert made.posted == ["monitor_rollback", "monitor_rollback_impossible"]


def test_stop_saves_a_checkpoint_and_ends_with_4(tmp_path):
    made = system(tmp_path, monitor={"action": "stop"})
    driver = Scripted(made, {5: MonitorAction(5, "stop", False, 1.0, None, "phase collapsed: reward")})
    with pytest.raises(UnspiralError, match="step 5: phase collapsed") as caught:
        asyncio.run(driver.run())
    assert caught.value.exit_code == 4 and latest(made.folder.path) == step_folder(made.folder.path, 5)


def test_a_torn_checkpoint_of_the_same_step_is_written_anew(tmp_path):
    made = system(tmp_path)
    driver, target = Scripted(made, {}), step_folder(made.folder.path, 4)
    driver.step = 4
    target.mkdir(parents=True)
    (target / "model.safetensors").write_bytes(b"half")
    asyncio.run(driver.checkpoints.save())
    assert latest(made.folder.path) == target
    written = (target / "state.json").stat().st_mtime_ns
    asyncio.run(driver.checkpoints.save())
    assert (target / "state.json").stat().st_mtime_ns == written  # a whole one is left as it is


def test_an_attempt_that_died_before_its_first_checkpoint_is_counted(tmp_path):
    made = system(tmp_path)
    driver = Scripted(made, {})
    driver.step = 4
    asyncio.run(driver.checkpoints.save())
    state = made.learner.load(step_folder(made.folder.path, 4))
    for expected in (1, 2, 3):  # resumed from the same checkpoint again and again
        resumed = Scripted(made, {})
        resumed.load_state_dict(state)
        assert resumed.attempt == expected


def test_a_resumed_run_counts_versions_as_an_undisturbed_one(tmp_path):
    made = system(tmp_path)
    driver = Scripted(made, {})
    driver.config.trainer.steps = 4
    asyncio.run(driver.run())
    made.pool = Pool()  # new workers
    resumed = Scripted(made, {})
    resumed.load_state_dict(made.learner.load(step_folder(made.folder.path, 2)))
    resumed.config.trainer.steps = 6
    asyncio.run(resumed.run())
    assert made.pool.versions == [2, 3, 4, 5, 6]


def test_going_on_from_an_older_checkpoint_drops_the_later_ones_of_the_abandoned_branch(tmp_path):
    made = system(tmp_path)
    asyncio.run(Scripted(made, {}).run())
    made.pool = Pool()
    resumed = Scripted(made, {})
    resumed.load_state_dict(made.learner.load(step_folder(made.folder.path, 4)))
    assert latest(made.folder.path) == step_folder(made.folder.path, 4)
    asyncio.run(resumed.run())
    assert made.learner.load(latest(made.folder.path))["attempt"] == 1


def test_a_run_begun_anew_without_a_checkpoint_is_the_next_attempt_and_leaves_nothing_of_the_dead_one(
    tmp_path,
):
    made = system(tmp_path)
    made.folder.metrics({"step": 1, "attempt": 0})
    torn = step_folder(made.folder.path, 2)
    torn.mkdir(parents=True)
    driver = Scripted(made, {})
    driver.begin_attempt()
    assert (driver.attempt, driver.step, made.folder.last_step()) == (1, 0, 0) and not torn.exists()
    assert [(e["event"], e["step"], e["attempt"]) for e in events(made)] == [("resume", 0, 1)]


def test_latest_before_a_step_and_dropping_later_ones(tmp_path):
    for step in (2, 4, 6):
        with written_aside(step_folder(tmp_path, step)) as folder:
            fill(folder, {})
    assert latest(tmp_path, before=6) == step_folder(tmp_path, 4) and latest(tmp_path, before=2) is None
    drop_after(tmp_path, 3)
    assert latest(tmp_path) == step_folder(tmp_path, 2)
