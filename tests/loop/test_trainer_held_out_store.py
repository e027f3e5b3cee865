"""Held-out scores reach the likelihood store when they are made: a real driver posts to a real service. The
learner and the pool are stood in for."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace
from typing import ClassVar

import httpx
import pytest
from rollout_fakes import words as tokenizer
from test_trainer_idle_steps import QUESTIONS, Sampling, Scoring
from test_trainer_monitor_actions import system

from services.common.errors import UserError
from services.contracts import Action, Trajectory
from services.likelihood.client import LikelihoodClient
from services.likelihood.exports.report import frozen
from services.likelihood.exports.run_files import read_run
from services.likelihood.rest.launch import ServeSettings, serve_in_thread
from trainer.loop.driver import Driver
from trainer.loop.records import tracking
from trainer.rewards import make_reward
from trainer.session.stopping import StopSignals


class Tracker:
    """Keeps the scores that it is given, by step."""

    points: ClassVar[list[tuple[int, float]]] = []

    def __init__(self, project):
        """A project of no server."""

    def step(self, run, step, time, metrics, phase):
        if "eval/em_greedy" in metrics:
            self.points.append((step, metrics["eval/em_greedy"]))

    def close(self):
        """Nothing to close."""


class Learning(Sampling):
    """Right on one question more after each step."""

    version = 0
    wants_weights = False

    async def rollout(self, requests, on_done=None):
        def answer(i, request):
            text = request.question.golden_answers[0] if i < self.version else "wrong"
            action = Action([5, 6], [-1.0, -1.0], 99, "answer", f"<answer> {text} </answer>")
            return Trajectory(request.uid, request.group, request.question, [1, 2], [action], "answer")

        return [answer(i, request) for i, request in enumerate(requests)]


def learning(folder):
    """A run that is evaluated before, after every second step and at its end."""
    made = system(
        folder,
        rollout={"prompts_per_step": 2, "group_size": 2, "max_response_tokens": 9},
        trainer={"steps": 3, "checkpoint_every": 0, "eval_at_ends": True, "eval_every": 2},
        probe={"fixed_size": 0},
        tracking={"wandb": "project"},
    )
    made.learner = Scoring()
    made.reward = make_reward("em")
    made.tokenizer = tokenizer()
    made.learner.config = made.config
    made.learner.scored = []
    made.cursor.take = lambda n: QUESTIONS[:n]
    made.eval_questions = QUESTIONS
    made.eval_retriever_url = None
    return made


def run(made, url, steps, from_state=None, eval_every=2):
    """Run it up to that step: the driver, and what the page would show after each evaluation."""
    made.pool = Learning()
    made.pool.version = from_state["step"] if from_state else 0
    trainer = made.config.trainer.model_copy(update={"steps": steps, "eval_every": eval_every})
    made.config = made.config.model_copy(update={"trainer": trainer})
    seen = []

    def look(*_):
        assert made.store.flush(60)
        seen.append((driver.step, scores(url, made.config.run.name)))

    progress = SimpleNamespace(
        stage=lambda *a: None,
        say=lambda text: None,
        trajectory=None,
        doing="",
        step=lambda metrics, alarms, standing: setattr(made.pool, "version", metrics["step"]),
        evaluation=look,
    )
    with LikelihoodClient(url, spool_dir=made.folder.path / "spool") as made.store:
        driver = Driver(made, progress, StopSignals(progress.say))
        if from_state:
            driver.load_state_dict(from_state)
        asyncio.run(driver.run())
        driver.recorder.close()
        assert made.store.flush(60)
    return driver, seen


def test_a_reward_that_hangs_ends_the_run_and_its_step_has_no_line(tmp_path, service):
    made = learning(tmp_path)
    over = threading.Event()
    exact = make_reward("em")

    def reward(trajectory):
        return over.wait(60) if trajectory.uid.startswith("000002") else exact(trajectory)

    made.reward = reward
    limit = made.config.reward.model_copy(update={"timeout_seconds": 5.0})
    made.config = made.config.model_copy(update={"reward": limit})
    with pytest.raises(UserError, match=r"reward.kind 'em': on trajectory 000002-0000-00: no result within "):
        run(made, service, 3)
    over.set()
    assert [line["step"] for line in read_run(made.folder.path).metrics] == [1]


def scores(url, name):
    """Held-out scores by step, as the page reads them."""
    answer = httpx.get(f"{url}/v1/runs/{name}/series", params={"names": "eval/em_greedy"}).json()
    curve = answer["series"].get("eval/em_greedy", {"mean": []})["mean"]
    return {s: v for s, v in zip(answer["step"], curve, strict=False) if v is not None}


def in_report(driver):
    folder = driver.system.folder.path
    shown = frozen(read_run(folder), folder)["series"]
    curve = shown["series"]["eval/em_greedy"]["mean"]
    return {s: v for s, v in zip(shown["step"], curve, strict=True) if v is not None}


@pytest.fixture
def service(tmp_path):
    server = serve_in_thread(ServeSettings(store=str(tmp_path / "likelihood.db"), port=0))
    yield server.url
    server.stop()


def test_page_report_and_trackers_show_every_evaluation_also_the_last_one_and_after_a_resume(
    tmp_path, service, monkeypatch
):
    monkeypatch.setattr(tracking, "WandbMirror", Tracker)
    monkeypatch.setattr(Tracker, "points", [])
    driver, seen = run(learning(tmp_path), service, 3)
    assert Tracker.points == [(1, 0.0), (2, 0.5), (3, 0.75)]
    name = driver.config.run.name
    assert seen == [
        (0, {0: 0.0}),
        (2, {1: 0.0, 2: 0.5}),
        (3, {1: 0.0, 2: 0.5, 3: 0.75}),
    ], "each when it was made, none twice"
    assert in_report(driver) == scores(service, name) == seen[-1][1]
    assert driver.summary()["em_after"] == 0.75
    events = httpx.get(f"{service}/v1/runs/{name}/events").json()
    assert [(e["kind"], e["step"], e["data"]["mode"]) for e in events] == [
        ("evaluation", step, "greedy") for step in (0, 2, 3)
    ]
    assert events[-1]["text"] == "after, greedy: EM 0.750, F1 0.750, right 0.750, n 4"

    at_three = json.dumps(driver.state_dict())
    again, seen = run(driver.system, service, 5, from_state=json.loads(at_three))
    assert [step for step, _ in seen] == [4, 5]
    expected = {1: 0.0, 2: 0.5, 3: 0.75, 4: 1.0, 5: 1.0}
    assert in_report(again) == scores(service, name) == seen[-1][1] == expected
    assert Tracker.points == list(expected.items())

    back, seen = run(again.system, service, 5, from_state=json.loads(at_three), eval_every=0)
    assert [step for step, _ in seen] == [5]
    expected.pop(4)
    assert in_report(back) == scores(service, name) == expected, "step 4 was made again, and not evaluated"
