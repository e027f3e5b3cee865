"""`reward_gap` without evaluations: what the reward calls right against the exact match of the same
answers."""

from __future__ import annotations

import json

import numpy as np
import pytest

from services.likelihood.monitor.phases import PhaseMonitor

BEGINS = 60
STEPS = 140


def course(*points):
    """[STEPS], straight between (step, level)."""
    return np.interp(np.arange(STEPS), *zip(*points, strict=True))


def alarms(right, match, seed, *, scale=(1.0, 0.0)):
    """Of batches of 40; the same answers are behind both shares. The run is resumed at each tenth step."""
    noise = np.random.default_rng(seed).normal(0, 0.05, STEPS)
    monitor = PhaseMonitor()
    found = []
    for step in range(STEPS):
        if step % 10 == 0:
            state = json.loads(json.dumps(monitor.state_dict()))
            monitor = PhaseMonitor()
            monitor.load_state_dict(state)
        share = float(np.clip(right[step] + noise[step], 0, 1))
        metrics = {
            "step": step,
            "reward/right": share,
            "reward/mean": scale[0] * share + scale[1],
            "reward/em": float(np.clip(match[step] + noise[step], 0, 1)),
        }
        found += [(a.rule, a.metric, a.step) for a in monitor.update(metrics).alarms]
    return found


LEARNT = course((0, 0.2), (30, 0.6), (STEPS, 0.6))
SLOW = course((0, 0.2), (120, 0.6), (STEPS, 0.6))
PAID = {
    "any answer": (np.where(np.arange(STEPS) < BEGINS, LEARNT, 1.0), LEARNT),
    "chance": (
        np.where(np.arange(STEPS) < BEGINS, LEARNT, 0.7),
        course((0, 0.2), (30, 0.6), (BEGINS, 0.6), (100, 0.2), (STEPS, 0.2)),
    ),
}


@pytest.mark.parametrize("kind", PAID)
@pytest.mark.parametrize("seed", range(3))
def test_a_reward_for_something_else_is_named_without_an_evaluation(kind, seed):
    ((rule, metric, step),) = alarms(*PAID[kind], seed)
    assert (rule, metric) == ("reward_gap", "reward/em") and BEGINS < step <= 100


HONEST = {
    "the exact match itself": (LEARNT, LEARNT),
    "a judge that accepts other wordings": (1.6 * SLOW, SLOW),
    "a judge that accepts as many throughout": (LEARNT + 0.2, LEARNT),
    "a fall of both": (course((0, 0.6), (60, 0.6), (100, 0.1), (STEPS, 0.1)),) * 2,
}


@pytest.mark.parametrize("kind", HONEST)
@pytest.mark.parametrize("scale", [(1.0, 0.0), (2.0, -1.0)], ids=["0 to 1", "-1 to 1"])
def test_a_reward_that_rises_with_the_exact_match_is_not(kind, scale):
    for seed in range(3):
        found = [alarm for alarm in alarms(*HONEST[kind], seed, scale=scale) if alarm[0] == "reward_gap"]
        assert found == []
