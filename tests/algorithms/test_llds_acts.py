"""LLDS says whether it acts: shares, the answer's weight, the reason of its silence, a warning about small
groups. And the held-out score reaches the monitor of a running driver."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from learner_world import make_batch
from test_config import BASE
from test_trainer_monitor_actions import Scripted, system

from services.likelihood.exports.run_files import read_run
from services.likelihood.monitor.detectors.learning.silent_llds import SilentLLDS
from services.likelihood.monitor.phases import PhaseMonitor
from services.settings import MonitorRules
from trainer.algorithms import llds_loss
from trainer.config.algorithm import AlgorithmSettings
from trainer.config.remarks import remarks
from trainer.config.schema import parse_config
from trainer.learner.group import joined
from trainer.learner.objective import StepStats, update_metrics
from trainer.learner.results import RankScores, RankUpdate


def test_actions_with_a_preserved_token_are_counted():
    ids = torch.tensor([[0, 0, -1, 1, 2], [0, -1, 1, -1, -1], [0, 1, 2, 3, -1]])
    drop = torch.tensor([[1.0, 1.0, 9.0, -1.0, 0.0], [1.0, 9.0, 1.0, 9.0, 9.0], [1.0] * 5])
    term = llds_loss(-drop, torch.zeros(3, 5), torch.tensor([0.5, 0.0, -0.5]), ids)
    assert (term.stats["preserved_actions"], term.stats["active_actions"]) == (5, 3)


def step_of(**counts):
    sums = dict.fromkeys(("policy/loss", "llds/loss", "llds/active_tokens"), 0.0)
    sums |= {"policy/count": 1.0, "llds/count": 1.0}
    return StepStats(sums | {f"llds/{key}": float(value) for key, value in counts.items()}, grad_norm=1.0)


def test_the_share_of_active_actions_is_over_all_steps_of_the_batch():
    steps = [
        step_of(active_actions=0, preserved_actions=6),
        step_of(active_actions=3, preserved_actions=2 + 4),
    ]
    assert update_metrics(steps, kl=False)["llds/active_action_share"] == 3 / 12
    none = update_metrics([step_of(active_actions=0, preserved_actions=0)], kl=False)
    assert "llds/active_action_share" not in none


@pytest.mark.parametrize(
    ("schedule", "weight", "stated"), [("paper", 0.2, 0.4), ("paper", 0.0, None), ("off", 0.2, None)]
)
def test_beta_is_stated_where_it_weighs_something(schedule, weight, stated):
    batch = make_batch(2)
    scores = np.zeros(len(batch.token_ids), np.float32)
    done = RankUpdate(
        RankScores([0, 1], scores, scores), [step_of(active_actions=1)], {"time/update_compute": 0.1}
    )
    algorithm = AlgorithmSettings.model_validate({"llds": {"answer_weight": schedule}})
    assert joined(batch, [done], algorithm, weight, 0.4).metrics.get("llds/beta") == stated


SILENT = {"llds/active_tokens": 0.0, "llds/lambda": 0.2, "learner/optimiser_steps": 4.0}


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"learner/optimiser_steps": 1.0}, "there is one optimiser step per batch"),
        ({"groups/zero_variance": 1.0}, "all advantages are 0"),
        ({"llds/min_drop": 0.1, "llds/largest_drop": 0.05}, "every drop is below min_drop, 0.1 nats"),
        ({"llds/min_drop": 0.1}, "every drop is below min_drop, 0.1 nats"),  # a trainer that does not say
        ({"llds/min_drop": 1e-6, "llds/largest_drop": 0.05}, "no preserved answer loses likelihood"),
        ({"llds/min_drop": 1e-6, "llds/largest_drop": 0.0}, "no preserved answer loses likelihood"),
    ],
)
def test_the_alarm_about_silence_names_its_reason(more, reason):
    detector = SilentLLDS(MonitorRules())
    alarms = [detector.update(step, SILENT | more) for step in range(1, 6)]
    assert alarms[:4] == [None] * 4
    assert alarms[4].seen.startswith(f"LLDS has held no token for 5 steps running: {reason}")


def warned(**sections):
    lines = remarks(parse_config(BASE | sections))
    return [line for line in lines if "llds/preserved_unrewarded" in line]


def test_small_groups_that_would_preserve_garbage_are_warned_of_in_one_line():
    (line,) = warned(rollout={"group_size": 2})
    assert (
        line.startswith("rollout.group_size=2 with algorithm.llds.preserve=nonnegative") and "\n" not in line
    )
    assert "algorithm.llds.preserve=right" in line
    assert len(warned(rollout={"group_size": 3})) == 1
    assert warned(rollout={"group_size": 4}) == []
    assert warned(rollout={"group_size": 2}, algorithm={"llds": {"preserve": "right"}}) == []
    assert warned(rollout={"group_size": 2}, algorithm={"llds": {"lambda": 0.0}}) == []


class Evaluating(Scripted):
    """Scores that fall from step 4 on, while the reward of training rises."""

    def __init__(self, made, wants):
        super().__init__(made, wants)
        self.evaluations.run = self.evaluate

    async def evaluate(self, tag):
        score = {"em": 0.9 if self.step < 4 else 0.5, "n": 200}
        self.scores[f"{tag}/greedy"] = score
        self.system.folder.event("evaluation", step=self.step, tag=tag, mode="greedy", overall=score)


def test_a_held_out_score_stands_in_the_line_of_the_next_step_and_counts_once(tmp_path):
    made = system(tmp_path)
    made.config.trainer.eval_every = 2
    driver = Evaluating(made, {})
    asyncio.run(driver.run())
    assert driver.held_out(2) == {"eval/em_greedy": 0.9}
    assert driver.held_out(4) == {"eval/em_greedy": 0.5} and driver.held_out(3) == {}

    folder = tmp_path / "recorded"
    folder.mkdir()
    rows = [{"step": step, "reward/mean": 0.5 + step / 100} for step in range(1, 41)]
    scores = {10: 0.9, 20: 0.6, 30: 0.5}
    for step, score in scores.items():
        rows[step]["eval/em_greedy"] = score  # as the running driver writes it: at the next step
    lines = [
        {"event": "evaluation", "step": s, "mode": "greedy", "overall": {"em": e}} for s, e in scores.items()
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    monitor = PhaseMonitor()
    live = [(a.rule, a.step) for row in rows for a in monitor.update(row).alarms]
    assert live == [("reward_gap", 31)]
    run = read_run(folder)
    run.add_evaluations()
    assert {row["step"]: row["eval/em_greedy"] for row in run.metrics if "eval/em_greedy" in row} == scores
    assert [(a["rule"], a["step"]) for a in run.replay()[1]] == [("reward_gap", 30)]


def test_the_driver_gives_its_monitor_the_score_of_the_weights_that_a_step_began_with(tmp_path):
    made = system(tmp_path)
    driver = Scripted(made, {})
    driver.scores = {"before/greedy": {"em": 0.25}, "step3/greedy": {"em": 0.5}, "step3/sampled": {"em": 0.4}}
    seen = []
    driver.recorder = SimpleNamespace(
        step=lambda result, metrics, repeated: (
            seen.append(metrics) or SimpleNamespace(step=1, phase="unknown", alarms=[])
        )
    )
    driver.actions = SimpleNamespace(decide=lambda state: None)
    driver.notices = SimpleNamespace(rewards=lambda *_: None)
    batch = SimpleNamespace(trajectories=[], rewards=np.zeros(0))
    for step in (1, 2, 4):
        result = SimpleNamespace(
            step=step,
            batch=batch,
            update=SimpleNamespace(idle=False, told=()),
            metrics=lambda: {"reward/mean": 1.0},
        )
        asyncio.run(driver.record(result))
    assert seen == [
        {"reward/mean": 1.0, "eval/em_greedy": 0.25},
        {"reward/mean": 1.0},
        {"reward/mean": 1.0, "eval/em_greedy": 0.5, "eval/em_sampled": 0.4},
    ]
