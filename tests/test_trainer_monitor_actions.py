"""The driver carries out what the monitor wants: rollback, stop, and the attempts that follow. Scripted steps on a real run folder."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest

from services.likelihood.actions import MonitorAction
from trainer.checkpoint import drop_after, latest, step_folder, written_aside
from trainer.config import parse_config
from trainer.driver import Driver, StoppedByMonitor
from trainer.run_folder import RunFolder


class Learner:
    """Saves and loads the driver's state as real checkpoints; has no weights."""

    def publish_weights(self, version):
        return version

    def save(self, path, state):
        with written_aside(path) as folder:
            (folder / "state.json").write_text(json.dumps(state))

    def load(self, path):
        return json.loads((path / "state.json").read_text())


class Pool:
    async def sync(self, update):
        self.version = update


class Scripted(Driver):
    """Steps do nothing but count; at the given calls the monitor wants something."""

    def __init__(self, system, wants):
        super().__init__(system, SimpleNamespace(stage=lambda *a: None, say=lambda text: None, trajectory=None))
        self.wants, self.trace = wants, []

    async def one_step(self, step):
        self.step = step
        self.trace.append((self.attempt, step))
        self.system.folder.metrics({"step": step, "attempt": self.attempt})
        action = self.wants.get(len(self.trace))
        if action:
            self.actions.changes += 1
            self.event(action.event())
        return action


def system(tmp_path, **changes):
    raw = {
        "run": {"name": "r", "dir": str(tmp_path)}, "model": {"path": "m"}, "data": {"train": "t"}, "retriever": {"url": "http://x"},
        "trainer": {"steps": 12, "checkpoint_every": 2, "keep_checkpoints": 9, "eval_at_ends": False}, "monitor": {"action": "rollback"},
    }  # fmt: skip
    config = parse_config(raw | changes)
    folder = RunFolder(config)
    folder.open(resume=False)
    posted = []
    store = SimpleNamespace(flush=lambda timeout: True, post_event=lambda run, event: posted.append(event.kind))
    cursor = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
    return SimpleNamespace(
        config=config,
        folder=folder,
        store=store,
        cursor=cursor,
        learner=Learner(),
        pool=Pool(),
        reward=None,
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
    assert [m["step"] for m in lines] == list(range(1, 13)) and [m["attempt"] for m in lines] == [0] * 4 + [1] * 8
    assert made.posted == ["monitor_rollback", "monitor_rolled_back"] and made.pool.version == 4
    assert [e["event"] for e in events(made) if e["event"].startswith(("monitor", "resume"))] == [
        "monitor_rollback",
        "resume",
        "monitor_rolled_back",
    ]
    assert json.loads((step_folder(made.folder.path, 8) / "state.json").read_text())["attempt"] == 1  # written anew


def test_without_a_checkpoint_from_before_the_fall_the_run_goes_on_and_says_so(tmp_path):
    made = system(tmp_path)
    driver = Scripted(made, {5: rollback(5, 2)})
    asyncio.run(driver.run())
    assert driver.trace == [(0, s) for s in range(1, 13)]
    assert made.posted == ["monitor_rollback", "monitor_rollback_impossible"]


def test_stop_saves_a_checkpoint_and_ends_with_4(tmp_path):
    made = system(tmp_path, monitor={"action": "stop"})
    driver = Scripted(made, {5: MonitorAction(5, "stop", False, 1.0, None, "phase collapsed: reward")})
    with pytest.raises(StoppedByMonitor, match="step 5: phase collapsed") as caught:
        asyncio.run(driver.run())
    assert caught.value.exit_code == 4 and latest(made.folder.path) == step_folder(made.folder.path, 5)


def test_an_attempt_that_died_before_its_first_checkpoint_is_counted(tmp_path):
    made = system(tmp_path)
    driver = Scripted(made, {})
    driver.step = 4
    asyncio.run(driver.checkpoint())
    state = made.learner.load(step_folder(made.folder.path, 4))
    for expected in (1, 2, 3):  # resumed from the same checkpoint again and again
        resumed = Scripted(made, {})
        resumed.load_state_dict(state)
        assert resumed.attempt == expected


def test_latest_before_a_step_and_dropping_later_ones(tmp_path):
    for step in (2, 4, 6):
        with written_aside(step_folder(tmp_path, step)) as folder:
            (folder / "state.json").write_text("{}")
    assert latest(tmp_path, before=6) == step_folder(tmp_path, 4) and latest(tmp_path, before=2) is None
    drop_after(tmp_path, 3)
    assert latest(tmp_path) == step_folder(tmp_path, 2)
