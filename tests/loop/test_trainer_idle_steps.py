"""Steps in which nothing can be learnt: what the driver makes of them, and what it says. The learner, pool
and store are stood in for."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from rollout_fakes import words as tokenizer
from test_trainer_monitor_actions import Learner, Pool, events, system

from services.contracts import Action, Question, Trajectory
from trainer.learner.group import Scores, UpdateResult
from trainer.learner.objective import can_act, update_metrics
from trainer.loop.driver import Driver
from trainer.rewards import make_reward
from trainer.session.stopping import StopSignals

QUESTIONS = [Question(str(i), f"q{i}?", ("a",), "lab") for i in range(4)]


class Scoring(Learner):
    """Scores all tokens alike, and takes no step where nothing can act."""

    def update(self, batch, *, llds_lambda, answer_beta, lr_scale):
        acts = can_act(self.config.algorithm, batch, llds_lambda=llds_lambda, anchored=False)
        ones = np.where(batch.action_ids >= 0, -1.0, 0.0).astype(np.float32)
        metrics = {"learner/optimiser_steps": 1.0, "grad_norm": 0.5} if acts else update_metrics([], kl=False)
        return UpdateResult(ones, -ones, metrics, 0)

    def score(self, batch):
        self.scored.append(len(batch))
        return Scores(np.full(len(batch.token_ids), -1.0, np.float32), np.zeros(len(batch.token_ids)))


class Sampling(Pool):
    made_by = 99
    """The version of the weights that the trajectories come from."""

    async def rollout(self, requests, on_done=None):
        kinds = ("answer", "invalid", "invalid", "invalid")
        return [
            Trajectory(
                r.uid,
                r.group,
                r.question,
                [1, 2],
                [Action([5, 6], [-1.0, -1.0], self.made_by, kinds[i % 4], "<answer> a </answer>")],
                "answer",
            )
            for i, r in enumerate(requests)
        ]


class Kept:
    """A likelihood store that holds what it was given."""

    def __init__(self):
        self.posted = []

    def get_tokens(self, run, step, timeout_seconds=None):
        return None

    def put_tokens(self, run, step, batch, attempt):
        """Nobody asks for them."""

    def post_samples(self, run, step, slide, lens, attempt):
        """Nobody looks at them."""

    def post_step(self, run, record):
        self.posted.append(record)

    def post_event(self, run, event):
        """Nobody asks for it."""

    def keep(self, timeout):
        """All of it is kept."""


def ran(tmp_path, reward, steps, action="none"):
    """A run of real steps with that reward function: the driver, its metrics by line, and what it said."""
    made = system(
        tmp_path,
        rollout={"prompts_per_step": 2, "group_size": 2, "max_response_tokens": 9},
        trainer={"steps": steps, "checkpoint_every": 0, "eval_at_ends": False},
        monitor={"action": action},
        probe={"fixed_size": 0},
    )
    made.pool, made.learner, made.store, made.reward, made.tokenizer = (
        Sampling(),
        Scoring(),
        Kept(),
        reward,
        tokenizer(),
    )
    made.learner.config, made.learner.scored = made.config, []
    made.cursor.take = lambda n: QUESTIONS[:n]
    said = []
    progress = SimpleNamespace(
        stage=lambda *a: None,
        say=said.append,
        trajectory=None,
        doing="",
        step=lambda metrics, alarms, standing: None,
    )
    driver = Driver(made, progress, StopSignals(said.append))
    asyncio.run(driver.run())
    lines = [json.loads(line) for line in made.folder.metrics_path.read_text().splitlines()]
    return driver, lines, said


ABSENT = (
    "grad_norm",
    "ratio/max",
    "policy/clip_fraction",
    "llds/active_tokens",
    "displacement/mean",
    "displacement/share_negative",
)


@pytest.mark.parametrize("action", ["stop", "rollback"])
def test_a_judge_that_is_down_neither_ends_nor_rolls_back_a_run(tmp_path, action):
    driver, lines, said = ran(tmp_path, lambda t: None, 4, action)
    assert [(m["step"], m["phase"]) for m in lines] == [(i, "unknown") for i in (1, 2, 3, 4)]
    unknown = (
        *ABSENT,
        "reward/mean",
        "reward/right",
        "groups/zero_variance",
        "logp/untrained",
        "nll/rounds_0",
    )
    assert all(not set(unknown) & set(m) and m["reward/missing"] == 4 for m in lines)
    seen = [(e["event"], e.get("rule")) for e in events(driver.system)]
    assert seen.count(("alarm", "no_reward")) == 1 and not any(
        name.startswith("monitor_") for name, _ in seen
    )
    assert [line for line in said if "nothing to learn" in line] == [
        "step 1: nothing to learn, the update is skipped: no trajectory has a reward: "
        "look whether what the reward function "
        "calls is up, and what it answers"
    ]
    records = driver.system.store.posted[0].trajectories
    assert {(t["reward"], t["right"], t["advantage"]) for t in records} == {(None, None, 0.0)}


def test_equal_rewards_skip_the_update_and_say_why_at_first_and_then_seldom(tmp_path):
    driver, lines, said = ran(tmp_path, lambda t: 0.0, 12)
    assert all(not set(ABSENT) & set(m) for m in lines) and driver.system.learner.scored == []
    assert all(m["groups/zero_variance"] == 1.0 and m["learner/optimiser_steps"] == 0 for m in lines)
    told = [line for line in said if "nothing to learn" in line]
    assert [line.split(":")[0] for line in told] == ["step 1", "step 11"]
    assert "(mean reward 0.000), and 25% of the turns hold a search or an answer" in told[0]
    assert "unspiral warm-start" in told[0] and "(11 such steps so far)" in told[1]
    assert [e["step"] for e in events(driver.system) if e["event"] == "nothing_learnt"] == [1, 11]
    assert driver.version == 12  # of each step, as after an update


def test_a_batch_that_lost_all_its_trajectories_is_an_idle_step_too(tmp_path, monkeypatch):
    monkeypatch.setattr(Sampling, "made_by", 0)
    driver, lines, _ = ran(tmp_path, lambda t: 1.0, 2)
    assert [m["rollout/stale_dropped"] for m in lines] == [0, 4] and "reward/em" not in lines[1]
    assert driver.monitor.phase == "unknown" and lines[1]["reward/missing"] == 0


def test_answers_that_are_all_right_are_told_apart_from_answers_that_are_all_wrong(tmp_path):
    _, lines, said = ran(tmp_path, lambda t: 1.0, 1)
    assert lines[0]["reward/right"] == 1.0 and "every answer is right" in said[-1]


def test_a_step_that_can_learn_is_measured_and_says_nothing(tmp_path):
    driver, lines, said = ran(tmp_path, lambda t: float(t.uid.endswith("0")), 2)
    assert [m["displacement/mean"] for m in lines] == [0.0, 0.0] and driver.system.learner.scored == [4, 4]
    assert lines[0]["reward/right"] == 0.5 and not [line for line in said if "nothing" in line]


def shaped(trajectory):
    return 2.5 if trajectory.uid.endswith("0") else 0.5


def tenth(trajectory):
    return 0.1 * trajectory.uid.endswith("0")


@pytest.mark.parametrize(
    ("function", "step", "words"), [(shaped, 1, "highest reward is 2.5"), (tenth, 10, "no answer is right")]
)
def test_a_reward_function_whose_best_value_is_not_known_is_asked_about_once(
    tmp_path, monkeypatch, function, step, words
):
    import test_trainer_monitor_actions as actions

    whole = actions.parse_config
    kind = f"{__name__}:{function.__name__}"
    monkeypatch.setattr(actions, "parse_config", lambda raw: whole(raw | {"reward": {"kind": kind}}))
    _, _, said = ran(tmp_path, make_reward(kind), 12)
    asked = [line for line in said if "reward.right_at" in line]
    assert len(asked) == 1 and asked[0].startswith(f"step {step}: ") and words in asked[0]


def test_lack_of_memory_that_the_learner_coped_with_is_said(tmp_path, monkeypatch):
    line = "memory ran out in an optimiser step, which was taken again"
    update = Scoring.update
    times = []

    def telling(self, batch, **given):
        times.append(batch)
        return replace(update(self, batch, **given), told=(line,) if len(times) == 2 else ())

    monkeypatch.setattr(Scoring, "update", telling)
    driver, _, said = ran(tmp_path, make_reward("em"), 3)
    assert [one for one in said if "memory" in one] == [f"step 2: learner: {line}"]
    (event,) = [e for e in events(driver.system) if e["event"] == "learner_memory"]
    assert (event["step"], event["text"]) == (2, line)
