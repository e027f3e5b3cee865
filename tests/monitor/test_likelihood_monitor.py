"""The phase monitor: phases and alarms on made-up and on recorded runs."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import numpy as np
import pytest
from likelihood_series import fall, healthy, series
from places import DATA
from pydantic import ValidationError

from services.likelihood.metrics.step_metrics import record_metrics
from services.likelihood.monitor.actions import MonitorActions
from services.likelihood.monitor.phases import PhaseMonitor
from services.likelihood.records import TrajectoryRecord
from services.settings import MonitorRules

LAB = DATA / "lab"
FELL = {"g15n_0": 103, "g15n_1": 84, "grpo_0": 29, "grpo_1": 32, "grpo_2": 20, "padmask_g15_0": 117}
"""Recorded falls: step at which the mean of 8 rewards was under .85 of its maximum for 3 steps."""
HELD = ("l15n_0", "l15n_1", "llds5_2")
NEW = {"collapse-0-grpo": 27, "collapse-1-grpo": 34, "collapse-1-llds": 43, "collapse-2-grpo": 26}
"""Falls of the real system (`unspiral demo --collapse`), recorded after the thresholds were set; the same
criterion."""


def replay(run, monitor=None):
    monitor = monitor or PhaseMonitor()
    states = [monitor.update(m) for m in run]
    return [s.phase for s in states], [a for s in states for a in s.alarms]


def quiet(phases):
    """Unknown until enough was seen, then healthy or stagnation."""
    known = phases.index("healthy")
    return set(phases[:known]) == {"unknown"} and set(phases[known:]) <= {"healthy", "stagnation"}


def lab(name):
    folder = LAB.parent / "demo_runs" if name.startswith("collapse") else LAB
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def changes(phases):
    return sum(a != b for a, b in pairwise(phases))


def test_twenty_healthy_runs_raise_no_alarm():
    for seed in range(20):
        phases, alarms = replay(healthy(seed))
        assert alarms == [], (seed, alarms[0].seen)
        assert quiet(phases)


@pytest.mark.parametrize(
    ("rate", "delay", "least"), [(0.04, 6, 1), (0.02, 15, 5), (0.01, 60, 20)], ids=["fast", "middle", "slow"]
)
def test_a_fall_of_likelihood_alarms_before_reward_has_lost_15_percent(rate, delay, least):
    leads = []
    for seed in range(20):
        run, lost = fall(seed, rate=rate, delay=delay)
        _, alarms = replay(run)
        assert alarms and alarms[0].rule == "likelihood" and alarms[0].step >= 100
        leads.append(lost - alarms[0].step)
    assert min(leads) > 0
    assert np.median(leads) >= least


def test_a_fall_goes_through_decay_and_acceleration_to_collapse_without_flapping():
    phases, alarms = replay(fall(3, rate=0.03, delay=25)[0])
    order = [
        p
        for p, q in zip(phases, [None, *phases], strict=False)
        if p != q and p not in ("unknown", "healthy", "stagnation")
    ]
    assert order == ["decay", "acceleration", "collapsed"]
    assert [a.rule for a in alarms] == ["likelihood", "acceleration", "collapse"]


def test_likelihood_that_slips_slowly_while_reward_holds_is_stagnation():
    n = 200
    level = np.where(np.arange(n) < 100, -0.03, -0.03 - 0.006 * (np.arange(n) - 100))
    reward = 0.3 + 0.5 * (1 - np.exp(-np.arange(n) / 40))
    phases, _ = replay(series(np.random.default_rng(0), level, reward, lag_noise=0.015)[:122])
    assert phases[-1] == "stagnation" and changes(phases) <= 4


def test_a_fall_that_stops_is_recovering_and_then_healthy():
    n = 300
    level = (
        -0.03 - np.clip((np.arange(n) - 80) * 0.03, 0, 0.6) + np.clip((np.arange(n) - 130) * 0.004, 0, 0.5)
    )
    phases, alarms = replay(series(np.random.default_rng(1), level, np.full(n, 0.7)))
    assert {"decay", "recovering"} <= set(phases) and phases[-1] == "healthy"
    assert alarms[0].cleared is not None and alarms[0].cleared > alarms[0].step
    assert changes(phases) <= 6


@pytest.mark.parametrize("name", FELL | NEW)
def test_recorded_falls_alarm_before_the_reward_fell(name):
    _, alarms = replay(lab(name))
    assert alarms[0].rule == "likelihood" and alarms[0].step < (FELL | NEW)[name]


@pytest.mark.parametrize("name", HELD)
def test_recorded_runs_that_held_raise_no_alarm(name):
    phases, alarms = replay(lab(name))
    assert alarms == [] and quiet(phases)


@pytest.mark.parametrize("name", FELL | NEW)
def test_shuffled_rewards_leave_the_alarm_where_it_was(name):
    run = lab(name)
    rewards = [m["reward/mean"] for m in run]
    random.Random(0).shuffle(rewards)
    shuffled = [{**m, "reward/mean": r} for m, r in zip(run, rewards, strict=True)]
    first, again = replay(run)[1][0], replay(shuffled)[1][0]
    assert (again.rule, again.step, again.since) == (first.rule, first.step, first.since)


def test_a_decaying_likelihood_without_probes_still_triggers_decay_then_collapse():
    run = [
        {k: v for k, v in m.items() if not k.startswith("probe/")} for m in fall(0, rate=0.03, delay=25)[0]
    ]
    phases, alarms = replay(run)
    assert phases.index("decay") < phases.index("collapsed")
    assert alarms[0].metric == "displacement/share_negative" and alarms[0].rule == "likelihood"


def test_with_llds_on_the_share_of_falling_answers_is_not_read():
    run = [{"step": i, "displacement/share_negative": 0.9, "llds/active_tokens": 0.2} for i in range(60)]
    assert replay(run)[1] == []


def test_gradients_that_are_not_finite_collapse_the_run_and_alarm():
    run = healthy(0, 60)
    for i in range(40, 45):
        run[i]["grad_norm"] = None if i % 2 else float("nan")
    phases, alarms = replay(run)
    assert phases[41] == "collapsed" and phases[40] != "collapsed" and phases[-1] == "recovering"
    assert [(a.rule, a.step, a.since) for a in alarms] == [("nonfinite", 41, 40)]


def test_equal_rewards_with_all_ratios_clipped_alarm():
    run = healthy(0, 60)
    for m in run[30:]:
        m |= {"groups/zero_variance": 1.0, "policy/clip_fraction": 1.0}
    alarms = replay(run)[1]
    assert [(a.rule, a.step, a.since) for a in alarms] == [("dead_batch", 32, 30)]


def test_a_run_whose_groups_are_all_wrong_alarms_and_one_whose_groups_are_all_right_does_not():
    wrong = [
        {"step": i, "reward/mean": 0.0, "groups/zero_variance": 1.0, "policy/clip_fraction": 0.0}
        for i in range(1, 31)
    ]
    phases, alarms = replay(wrong)
    assert [(a.rule, a.step, a.since) for a in alarms] == [("dead_batch", 10, 8)] and "warm-start" in alarms[
        0
    ].advice
    assert set(phases) == {"unknown"}, "no sign of likelihood has been seen"
    assert replay([m | {"reward/mean": 1.0} for m in wrong])[1] == []
    assert replay([m | {"groups/zero_variance": 0.9} for m in wrong])[1] == []


@pytest.mark.parametrize("rules", [{"lag_nats": -0.02}, {"lag_clear_nats": -0.08}])
def test_a_threshold_at_which_the_alarm_would_end_before_it_begins_is_refused(rules):
    with pytest.raises(ValidationError, match=r"(?s)lag_clear_nats.*must be above lag_nats="):
        MonitorRules(**rules)


def test_a_leak_between_sampler_and_learner_alarms():
    run = healthy(0, 80)
    for m in run[40:]:
        m["leak/logp_entropy"] = 0.5
    alarms = replay(run)[1]
    assert [a.rule for a in alarms] == ["leak"] and 40 < alarms[0].step < 50 and "Mask" in alarms[0].advice


def test_missing_and_null_metrics_are_tolerated():
    assert (
        replay(
            [
                {},
                {"step": 1, "probe/lag": None},
                {"step": 2, "reward/mean": "x"},
                {"step": 9, "entropy": float("nan")},
            ]
        )[0]
        == ["unknown"] * 4
    )


def test_a_state_dict_goes_on_exactly_where_it_was_taken():
    run = lab("grpo_1")
    whole, alarms = replay(run)
    first, second = PhaseMonitor(), PhaseMonitor()
    start, _ = replay(run[:30], first)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    rest, later = replay(run[30:], second)
    assert start + rest == whole
    assert [a.step for a in later] == [a.step for a in alarms if a.step >= 30]


def test_an_alarm_says_what_since_when_how_sure_and_what_to_do():
    alarm = replay(lab("grpo_2"))[1][0]
    assert (
        alarm.metric == "probe/lag" and alarm.since <= alarm.step and alarm.confidence in ("medium", "high")
    )
    assert (
        "nats a token" in alarm.seen
        and f"step {alarm.since}" in alarm.advice
        and "llds.lambda" in alarm.advice
    )


def unrewarded(step, **metrics):
    """What a step posts none of whose trajectories has a reward; earlier versions posted a norm of null with
    it."""
    return {"step": step, "reward/missing": 20.0, "learner/optimiser_steps": 0.0, **metrics}


@pytest.mark.parametrize("kind", ["stop", "rollback", "lower_lr", "raise_lambda"])
@pytest.mark.parametrize("norm", [{}, {"grad_norm": None}])
def test_batches_without_any_reward_are_an_alarm_of_their_own_and_no_action(kind, norm):
    monitor, actions = PhaseMonitor(), MonitorActions(kind)
    run = healthy(0, 40)
    rules = []
    for metrics in [*run[:20], *(unrewarded(i, **norm) for i in range(20, 30)), *run[30:]]:
        state = monitor.update(metrics)
        assert actions.decide(state) is None
        assert state.phase in (("healthy", "stagnation") if metrics["step"] > 10 else ("unknown", "healthy"))
        rules += [(a.rule, a.step, a.metric) for a in state.alarms]
        ended = [(a.rule, a.cleared) for a in state.cleared]
        assert ended == ([("no_reward", 30)] if metrics["step"] == 30 else [])
    assert rules == [("no_reward", 20, "reward/missing")]


def test_a_run_that_begins_without_rewards_is_not_collapsed():
    phases, alarms = replay([unrewarded(i, grad_norm=None) for i in range(1, 4)])
    assert phases == ["unknown"] * 3 and [(a.rule, a.step) for a in alarms] == [("no_reward", 1)]


def test_a_step_that_measured_no_norm_neither_adds_to_those_without_a_finite_one_nor_ends_them():
    run = healthy(0, 30)
    run[20]["grad_norm"] = run[22]["grad_norm"] = None
    run[21] = unrewarded(21)
    phases, alarms = replay(run)
    assert [(a.rule, a.step) for a in alarms] == [("no_reward", 21), ("nonfinite", 22)]
    assert phases[22] == "collapsed"


def test_a_trainer_that_knows_no_rewards_gets_neither_a_dead_batch_nor_an_alarm_about_rewards():
    made = {
        "uid": "a",
        "group": "g",
        "reward": None,
        "advantage": 1.0,
        "actions": [{"tokens": 2, "logp_before": -1.0}],
    }
    other = made | {"uid": "b", "advantage": -1.0}
    records = [TrajectoryRecord.model_validate(t) for t in (made, other)]
    posted = record_metrics(records)
    assert "groups/zero_variance" not in posted and "reward/mean" not in posted
    run = [{"step": i, **posted, "policy/clip_fraction": 1.0} for i in range(40)]
    assert replay(run)[1] == []


OF_ITS_DAY = {"confidence": "sure", "advice": "advice"}
"""What an alarm that stands keeps from the version that raised it."""


def test_a_state_of_an_earlier_day_is_taken_up():
    run = lab("grpo_1")
    earlier = json.loads((LAB.parent / "monitor_state_grpo_1_step_30.json").read_text())
    monitor, today = PhaseMonitor(), PhaseMonitor()
    monitor.load_state_dict(earlier)
    for metrics in run[:31]:
        today.update(metrics)
    of_that_day = {name: earlier["open"]["likelihood"][key] for name, key in OF_ITS_DAY.items()}
    assert [a.as_dict() for a in monitor.open.values()] == [
        a.as_dict() | of_that_day for a in today.open.values()
    ]
    for metrics in run[31:]:
        old, new = monitor.update(metrics), today.update(metrics)
        assert (old.phase, old.alarms) == (new.phase, new.alarms)
    del earlier["unrewarded"]  # which the version before that did not keep
    PhaseMonitor().load_state_dict(earlier)
