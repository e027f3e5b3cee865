"""A clock that is set by an hour, forth and back, in mid-run: nothing waits by it or is ordered by it."""

from __future__ import annotations

import ast
import asyncio
import itertools
import json
import time
from pathlib import Path

import pytest
from places import ROOT
from test_likelihood_client import record
from test_trainer_monitor_actions import Scripted, events, rollback, system

from services.likelihood.records import EventRecord
from services.likelihood.store.opening import open_store
from trainer.learner.checkpoint import latest
from trainer.loop.run.spans import read_spans, write_spans

BY_THE_CLOCK = {
    "services/likelihood/exports/prometheus.py": "which runs were written to in the last minutes",
    "services/likelihood/exports/upkeep.py": "which runs are older than so many days",
}
"""Files that compare times of the clock, and why."""


@pytest.fixture
def jumping(monkeypatch):
    """Each look at the clock is an hour ahead or behind of the one before."""
    real = time.time
    hours = itertools.cycle((3600.0, -3600.0, 0.0))
    monkeypatch.setattr(time, "time", lambda: real() + next(hours))


class Timed(Scripted):
    """Steps that write their spans."""

    async def one_step(self, step):
        self.clock.begin()
        with self.clock.measure("update"):
            action = await super().one_step(step)
        write_spans(self.system.folder.path, step, self.attempt, *self.clock.end(), [])
        return action


def test_a_run_steps_saves_rolls_back_and_ends_as_ever(tmp_path, jumping):
    made = system(tmp_path)
    driver = Timed(made, {9: rollback(9, 6)})
    summary = asyncio.run(asyncio.wait_for(driver.run(), 60))
    folder = made.folder.path
    steps = [json.loads(line)["step"] for line in made.folder.metrics_path.read_text().splitlines()]
    assert steps == list(range(1, 13)) and driver.attempt == 1 and summary["steps"] == 12
    assert latest(folder).name == "step_000012"
    saved = [event["step"] for event in events(made) if event["event"] == "checkpoint"]
    assert saved == [2, 4, 6, 8, 6, 8, 10, 12]
    for step in steps:
        spans = read_spans(folder, step)
        assert spans.ended >= spans.began and all(span[2] >= 0 for span in spans.driver)


def test_a_store_gives_steps_and_events_in_their_order(tmp_path, jumping):
    store = open_store(f"sqlite:{tmp_path / 'l.db'}")
    for step in range(1, 7):
        store.put_step("run", record(step))
        store.put_event("run", EventRecord(step=step, kind="checkpoint", text=""))
    assert [kept.step for kept in store.steps("run", 0, 10)] == [1, 2, 3, 4, 5, 6]
    assert [event["step"] for event in store.events("run")] == [1, 2, 3, 4, 5, 6]
    info = store.info("run")
    assert (info.first_step, info.last_step, info.steps) == (1, 6, 6)
    assert store.put_step("run", record(4, attempt=1)).superseded == 3  # a later attempt is the higher number
    store.close()


def looks(node: ast.AST) -> bool:
    """Whether it asks the clock: `time.time()` or `datetime.now()`."""
    return any(
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and (call.func.value.id, call.func.attr) in {("time", "time"), ("datetime", "now")}
        for call in ast.walk(node)
    )


def test_no_wait_and_no_choice_goes_by_the_clock():
    """Timeouts are counted by `time.monotonic`."""
    found = {
        str(file.relative_to(ROOT))
        for room in ("trainer", "services", "retriever_service")
        for file in Path(ROOT, room).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Compare | ast.While)
        and looks(node.test if isinstance(node, ast.While) else node)
    }
    assert found == set(BY_THE_CLOCK)
