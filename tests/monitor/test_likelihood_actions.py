"""What the monitor's actions decide, step by step, over made-up runs."""

from __future__ import annotations

import json

import numpy as np
import pytest
from likelihood_series import fall, healthy, series

from services.likelihood.monitor.actions import MonitorActions
from services.likelihood.monitor.phases import PhaseMonitor


def decisions(kind, run, actions=None):
    monitor, actions = PhaseMonitor(), actions or MonitorActions(kind)
    made = [actions.decide(monitor.update(m)) for m in run]
    return [a for a in made if a], actions


def falls_and_recovers():
    n = 320
    level = (
        -0.03 - np.clip((np.arange(n) - 80) * 0.03, 0, 0.9) + np.clip((np.arange(n) - 150) * 0.004, 0, 0.9)
    )
    return series(np.random.default_rng(1), level, np.full(n, 0.7))


def test_lambda_is_raised_at_the_alarm_again_while_it_falls_and_put_back_when_healthy():
    made, actions = decisions("raise_lambda", falls_and_recovers())
    assert [(a.undo, a.factor) for a in made] == [(False, 2.0), (False, 4.0), (False, 8.0), (True, 1.0)]
    assert 80 < made[0].step < 95 and made[1].step - made[0].step == 20
    assert actions.lambda_of(0.2) == 0.2
    assert (
        made[0].event().kind == "monitor_raise_lambda" and made[3].event().kind == "monitor_undo_raise_lambda"
    )
    assert "nats a token" in made[0].event().text


def test_a_run_without_llds_gets_a_first_lambda():
    actions = MonitorActions("raise_lambda")
    actions.changes = 1
    assert actions.lambda_of(0.0) == pytest.approx(0.1) and actions.lambda_of(0.2) == pytest.approx(0.4)
    assert actions.lr_scale == 1.0


def test_the_learning_rate_is_lowered_at_most_three_times():
    run, _ = fall(0, rate=0.03, delay=400, depth=100.0)  # likelihood falls on and on, reward holds
    made, actions = decisions("lower_lr", run)
    assert [a.factor for a in made] == [2.0, 4.0, 8.0] and actions.lr_scale == 0.125
    assert actions.lambda_of(0.2) == 0.2


def test_rollback_goes_to_before_the_fall_began_with_half_the_learning_rate():
    run, _ = fall(0, rate=0.03, delay=25)
    monitor, actions = PhaseMonitor(), MonitorActions("rollback")
    for metrics in run:
        if action := actions.decide(monitor.update(metrics)):
            break
    assert (
        (action.kind, action.undo) == ("rollback", False)
        and 100 <= action.before_step < action.step
        and actions.lr_scale == 0.5
    )
    fresh = MonitorActions("rollback")
    fresh.load_state_dict(json.loads(json.dumps(actions.state_dict())))
    monitor, later = PhaseMonitor(), []
    for metrics in healthy(0)[90:]:  # from the checkpoint on, now without a fall
        later.append(fresh.decide(monitor.update(metrics)))
    (undo,) = [a for a in later if a]
    assert undo.undo and undo.step == action.step + 20 and fresh.lr_scale == 1.0


def test_rollbacks_come_to_an_end():
    actions = MonitorActions("rollback")
    for _ in range(5):  # the run falls again each time
        decisions("rollback", fall(0, rate=0.03, delay=25)[0][80:], actions)
    assert actions.changes == 3 and actions.lr_scale == 0.125


def test_stop_comes_once_when_the_run_collapses():
    made, _ = decisions("stop", fall(0, rate=0.03, delay=25)[0])
    assert [a.kind for a in made] == ["stop"] and "reward" in made[0].why


def test_an_action_names_the_fall_and_not_another_alarm_that_stands():
    run, _ = fall(0, rate=0.03, delay=400, depth=100.0)
    for m in run[110:]:
        m["leak/logp_entropy"] = 0.5
    made, _ = decisions("lower_lr", run)
    assert len(made) == 3 and all("nats a token" in a.why for a in made)


@pytest.mark.parametrize("kind", ["none", "raise_lambda", "lower_lr", "rollback", "stop"])
def test_healthy_runs_are_left_alone(kind):
    assert all(decisions(kind, healthy(seed))[0] == [] for seed in range(5))
    if kind == "none":
        assert decisions("none", fall(0, rate=0.03, delay=25)[0])[0] == []
