"""A run that waits says what for, and since when; one that is told nothing new says nothing."""

from __future__ import annotations

import io
import itertools
import re
import threading
import time
from types import SimpleNamespace

import pytest
from rich.console import Console
from rollout_fakes import ScriptedWorker

from services.contracts import WorkerInfo
from services.rollout.errors import WorkerLostError
from services.rollout.pool.member import Member
from services.rollout.pool.roster import Roster
from services.settings import RolloutSettings
from services.worker_state import WorkerState
from trainer.loop.run.progress import Progress
from trainer.session import waits
from trainer.session.waits import progress_of, told, waits_of

LINE = r"^waiting since \d\d:\d\d:\d\d \(\d+ s\): {}$"


class Said(list):
    """What is said, and a wait for a number of lines."""

    def __init__(self):
        super().__init__()
        self.more = threading.Condition()

    def __call__(self, text):
        with self.more:
            self.append(text)
            self.more.notify_all()

    def until(self, n, seconds=60.0):
        with self.more:
            assert self.more.wait_for(lambda: len(self) >= n, seconds), list(self)


@pytest.fixture
def said(monkeypatch):
    monkeypatch.setattr(waits, "SAY_SECONDS", 0.05)
    return Said()


def test_a_wait_is_told_again_and_again_and_no_more_when_it_is_over(said):
    with told(said, "the retriever to start"):
        said.until(3)
    count = len(said)
    time.sleep(0.2)
    assert len(said) == count
    assert all(re.match(LINE.format("the retriever to start"), line) for line in said)


def test_it_is_told_every_15_seconds():
    assert waits.SAY_SECONDS == 15.0


def test_progress_begins_the_wait_anew(said, monkeypatch):
    monkeypatch.setattr(waits, "SAY_SECONDS", 0.5)
    steps, looks, over = itertools.count(), threading.Semaphore(0), threading.Event()

    def step():
        """Another at each look, until it is over."""
        looks.release()
        return -1 if over.is_set() else next(steps)

    with told(said, "step 1", step):
        for _ in range(15):  # thrice as many as a wait that is told lasts
            assert looks.acquire(timeout=60)
        assert said == []
        over.set()
        said.until(1)


def test_what_changes_under_the_look_is_told_at_the_next(said):
    answers = iter([RuntimeError("dictionary changed size during iteration"), "", "w0.2 is starting"])

    def what():
        answer = next(answers, "w0.2 is starting")
        if isinstance(answer, Exception):
            raise answer
        return answer

    with told(said, what):
        said.until(1)
    assert re.match(LINE.format("w0.2 is starting"), said[0])


def roster(workers=1):
    settings = RolloutSettings(workers=workers, engine="transformers")
    made = Roster(settings, on_event=lambda event: None, on_change=lambda: None)
    made.target = workers
    return made


def member(slot, **info):
    about = WorkerInfo(f"w{slot}.1", 1, "n", 0, **info)
    return Member(slot, about.id, ScriptedWorker(None), about, state=WorkerState.READY, jobs={"a": None})


def test_a_pool_says_who_serves_what_searches_wait_for_and_who_is_to_come():
    made = roster(2)
    waiting = "2 searches wait for the retriever at http://x, for up to 34 s: 503 down"
    made.members = {0: member(0), 1: member(1, waits_for=waiting)}
    assert made.waits_for() == f"2 trajectories on 2 rollout workers; w1.1: {waiting}"
    for each in list(made.members.values()):
        each.jobs.clear()
        made.lose(each, WorkerLostError(f"worker {each.id}: ActorDiedError: killed"))
    made.incarnations.update({0: 2, 1: 2})
    made.starting = {0: None, 1: None}
    said = made.waits_for()
    assert said.startswith(
        "no rollout worker serves: w0.2 is starting, w1.2 is starting (the last one ended by"
    )
    assert "ActorDiedError: killed" in said and "\n" not in said


def test_a_run_names_its_stage_and_a_paused_one_waits_for_nothing():
    pool = SimpleNamespace(waits_for=lambda: "no rollout worker serves", trajectories=3)
    calls = SimpleNamespace(waits_for=lambda: "", returned=0)
    driver = SimpleNamespace(
        idle=False,
        on_learner=SimpleNamespace(doing=None, returned=1),
        step=2,
        attempt=0,
        progress=SimpleNamespace(doing="step 3: rollout"),
        system=SimpleNamespace(pool=pool),
        sampler=SimpleNamespace(calls=calls),
    )
    assert waits_of(driver) == "step 3: rollout: no rollout worker serves"
    before = progress_of(driver)
    judging = "reward.kind 'm:judge' on trajectory u7 for 4 s (3 of 8 done)"
    calls.waits_for, calls.returned = lambda: judging, 2
    assert waits_of(driver) == f"step 3: rollout: {judging}"
    assert progress_of(driver) == before, "256 calls of a second each: the line tells how many are done"
    driver.on_learner.doing, driver.progress.doing = "update", "step 3: update"
    assert waits_of(driver) == "step 3: update" and progress_of(driver) != before
    driver.idle = True
    assert waits_of(driver) == ""


def test_the_time_left_does_not_grow_by_a_step_that_waited(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("trainer.loop.run.progress.time.monotonic", lambda: clock[0])
    progress, left = Progress(12, Console(file=io.StringIO(), width=200)), []
    for step, seconds in enumerate((4.0, 4.2, 4.1, 90.0, 4.2, 4.0), 1):
        clock[0] += seconds
        progress.step({"step": step, "time/step": seconds}, [])
        left.append(progress._left(step))
    assert left == ["0m44s", "0m40s", "0m37s", "0m33s", "0m29s", "0m25s"]
    clock[0] += 3
    assert progress._left(6) == "0m22s"
    clock[0] += 300  # the next step waits too
    assert progress._left(6) == "0m20s"
