"""Runs whose metrics stop, hang, cannot be, come out of order or creep: named or unknown, never `healthy`."""

from __future__ import annotations

import json

import numpy as np
import pytest
from sick_runs import healthy_run, rows

from services.common.errors import UserError
from services.likelihood.monitor.phases import PhaseMonitor

SIGNS = ("probe/lag", "probe/fixed", "displacement/share_negative")


def replay(run):
    monitor = PhaseMonitor()
    states = [monitor.update(m) for m in run]
    json.dumps(monitor.state_dict(), allow_nan=False)
    return [s.phase for s in states], [(a.rule, a.step) for s in states for a in s.alarms]


def without(run, names, first, last=10_000):
    return [{k: v for k, v in m.items() if k not in names or not first <= m["step"] < last} for m in run]


@pytest.mark.parametrize("names", [SIGNS, ("reward/mean",), None], ids=["signs", "reward", "all"])
@pytest.mark.parametrize("empty", [False, True], ids=["absent", "NaN"])
def test_healthy_ends_with_what_it_was_earned_by_and_comes_back_with_it(names, empty):
    run = rows(healthy_run(0, 140))
    names = names or tuple(name for name in run[0] if name not in ("step", "grad_norm"))
    gone = without(run, names, 60, 110)
    if empty:
        gone = [{**dict.fromkeys(names, float("nan")), **m} if 60 <= m["step"] < 110 else m for m in gone]
    phases, _ = replay(gone)
    assert phases[59] == phases[89] == "healthy", "a few steps without a value are no news"
    assert set(phases[90:110]) == {"unknown"}
    assert phases[-1] == "healthy"


@pytest.mark.parametrize("every", [2, 10, 25])
def test_signs_that_come_at_every_few_steps_are_enough(every):
    run = rows(healthy_run(1, 300))
    seldom = [m if m["step"] % every == 0 else {k: v for k, v in m.items() if k not in SIGNS} for m in run]
    phases, alarms = replay(seldom)
    known = phases.index("healthy")
    assert known <= 10 * every and set(phases[known:]) == {"healthy"} and alarms == []


def test_a_probe_that_hangs_is_no_sign():
    run = [{"step": s, "reward/mean": 0.5 + 0.01 * (s % 3), "probe/lag": 0.001 * s} for s in range(100)]
    for m in run[40:]:
        m["probe/lag"] = 0.04
    phases, _ = replay(run)
    assert phases[40] == "healthy" == phases[70] and set(phases[71:]) == {"unknown"}


def test_a_run_of_constants_is_unknown():
    for value in (0.0, 0.5):
        names = set(rows(healthy_run(0))[0]) - {"step"}
        phases, _ = replay([{"step": s, **dict.fromkeys(names, value)} for s in range(60)])
        assert set(phases) == {"unknown"}


def test_a_fall_is_seen_in_the_frozen_answers_once_the_lag_probe_has_stopped():
    run = without(rows(healthy_run(2, 200)), ("probe/lag", "displacement/share_negative"), 60)
    for m in run[120:]:
        m["probe/fixed"] -= 0.02 * (m["step"] - 120)
    (first, *_) = replay(run)[1]
    assert first[0] == "likelihood" and 120 < first[1] < 140


def test_a_fall_that_was_named_does_not_end_by_silence():
    run = rows(healthy_run(2, 160))
    for m in run[60:]:
        m["probe/lag"] = -0.2
    monitor = PhaseMonitor()
    states = [monitor.update(m) for m in without(run, SIGNS, 80)]
    assert {"likelihood"} <= {a.rule for a in states[-1].active}
    assert states[-1].phase in ("decay", "acceleration")


def test_after_a_step_back_healthy_is_earned_anew():
    run = rows(healthy_run(3, 120))
    phases, alarms = replay(run[:100] + run[50:])
    assert phases[99] == "healthy" and set(phases[100:107]) == {"unknown"} and phases[108] == "healthy"
    assert alarms == []


def test_two_runs_in_one_are_never_healthy():
    both = zip(rows(healthy_run(1, 120)), rows(healthy_run(2, 120)), strict=True)
    phases, _ = replay([m for pair in both for m in pair])
    assert set(phases) == {"unknown"}


@pytest.mark.parametrize("step", [float("nan"), "x", 1.5])
def test_a_step_that_is_no_whole_number_is_refused(step):
    with pytest.raises(UserError, match=r"step: .*; expected a whole number"):
        PhaseMonitor().update({"step": step})


def test_values_that_cannot_be_are_passed_over():
    """Shares in percent, and negative amounts: they raise nothing and end nothing."""
    shares = ("rollout/valid", "groups/zero_variance", "eval/em_greedy")
    run = rows(healthy_run(4))
    for m in run[100:]:
        m |= {name: 100 * m[name] for name in shares if name in m}
        m |= {name: -2 - m[name] for name in ("entropy", "grad_norm", "rollout/length")}
    assert replay(run)[1] == []
    for m in run:
        m["probe/lag"] = 1e300
        del m["probe/fixed"], m["displacement/share_negative"]
    assert set(replay(run)[0]) == {"unknown"}


@pytest.mark.parametrize("broken", [None, float("nan")])
def test_a_gradient_that_breaks_after_a_value_that_cannot_be_is_named(broken):
    run = rows(healthy_run(4, 130))
    run[100]["grad_norm"] = -1.0  # as trainers mark an overflow
    for m in run[101:]:
        m["grad_norm"] = broken
    phases, alarms = replay(run)
    assert alarms == [("nonfinite", 102)] and set(phases[102:]) == {"collapsed"}


@pytest.mark.parametrize("value", [1e300, 1.7e308, 10**400, np.float64(1e300)])
@pytest.mark.parametrize(
    ("name", "rule"), [("grad_norm", "gradient"), ("entropy", "entropy_high"), ("rollout/length", "length")]
)
def test_huge_values_are_named_and_the_state_stays_plain_json(name, rule, value):
    run = rows(healthy_run(5, 140))
    for m in run[100:]:
        m[name] = value
    assert [found for found, _ in replay(run)[1]] == [rule]


def test_scalars_of_arrays_and_tensors_count():
    torch = pytest.importorskip("torch")
    for made in (np.float32, np.array, torch.tensor):
        run = rows(healthy_run(6, 140))
        for m in run[100:]:
            m["rollout/valid"] = 0.1
        named = [{k: v if k == "step" else made(v) for k, v in m.items()} for m in run]
        assert [found for found, _ in replay(named)[1]] == ["validity"]
    assert set(replay([{"step": 1, "reward/mean": np.zeros(3), "entropy": [1], "probe/lag": {}}])[0]) == {
        "unknown"
    }


CREEPING = {
    "validity": ("rollout/valid", 0.97, 0.1),
    "truncation": ("rollout/truncated", 0.03, 0.9),
    "entropy_high": ("entropy", 0.4, 6.6),
    "interaction": ("rollout/searches", 1.6, 0.0),
    "length": ("rollout/length", 100.0, 1200.0),
}


@pytest.mark.parametrize("rule", CREEPING)
def test_a_change_of_thousands_of_steps_is_named(rule):
    """The usual level follows what is held; what creeps would take it along for ever."""
    name, start, end = CREEPING[rule]
    noise = np.random.default_rng(0).normal(0, 0.02, 3000)
    run = [
        {"step": s, name: max(0.0, start + (end - start) * max(0, s - 100) / 2900 + 0.2 * noise[s])}
        for s in range(3000)
    ]
    monitor = PhaseMonitor()
    found = []
    for m in run:
        if m["step"] % 500 == 0:  # as a run that is resumed
            state = json.loads(json.dumps(monitor.state_dict()))
            monitor = PhaseMonitor()
            monitor.load_state_dict(state)
        found += monitor.update(m).alarms
    assert [a.rule for a in found] == [rule]
    assert found[0].threshold is not None and f"usually {found[0].value:.3g}" not in found[0].seen


def of_rewards(*levels, noise=0.05):
    """(steps, level at their end), from the first level on."""
    ends = np.concatenate([[0], np.cumsum([steps for steps, _ in levels[1:]])])
    course = np.interp(np.arange(ends[-1]), ends, [level for _, level in levels])
    values = course + np.random.default_rng(0).normal(0, noise, len(course))
    return [{"step": s, "reward/mean": float(v)} for s, v in enumerate(values)]


@pytest.mark.parametrize(
    ("levels", "noise", "begins"),
    [
        (((0, -0.9), (60, -0.1), (40, -0.1), (30, -0.9), (40, -0.9)), 0.05, 100),
        (((0, -0.2), (80, -0.2), (30, -0.9), (40, -0.9)), 0.05, 80),
        (((0, -80), (60, -5), (40, -5), (30, -80), (40, -80)), 5.0, 100),
        (((0, 0.2), (60, 0.8), (30, -0.9), (40, -0.9)), 0.05, 60),
    ],
    ids=["rose and fell", "fell alone", "tens", "positive before"],
)
def test_negative_rewards_that_are_lost_are_a_collapse(levels, noise, begins):
    phases, ((rule, step),) = replay(of_rewards(*levels, noise=noise))
    assert rule == "collapse" and begins < step <= begins + 60 and phases[-1] == "collapsed"


@pytest.mark.parametrize("seed", range(5))
def test_negative_rewards_that_hold_are_none(seed):
    rng = np.random.default_rng(seed)
    for start, end, noise in ((-0.8, 0.1, 0.15), (-0.5, -0.5, 0.1), (-50, -5, 4), (-0.02, 0.02, 0.1)):
        at = np.arange(300)
        level = start + (end - start) * (1 - np.exp(-at / 20))
        run = [
            {"step": int(s), "reward/mean": float(v)}
            for s, v in zip(at, level + rng.normal(0, noise, 300), strict=True)
        ]
        assert replay(run)[1] == []


def test_a_gradient_that_grows_is_named_whatever_the_sign_of_the_reward():
    run = rows(healthy_run(7, 140))
    for m in run:
        m["reward/mean"] = 5 * m["reward/mean"] - 8
    for m in run[100:]:
        m["grad_norm"] *= 100
    assert [found for found, _ in replay(run)[1]] == ["gradient"]
