"""The detectors: each sickness is named by its own rule, healthy runs by none, recorded runs as before."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest
from places import ROOT
from sick_runs import BEGINS, healthy_run, rows, sick_run

from services.likelihood.monitor.alarms import PHASES, Alarm
from services.likelihood.monitor.detectors.table import DETECTORS, READS
from services.likelihood.monitor.phases import PhaseMonitor
from services.settings import MonitorRules

BEFORE = json.loads((ROOT / "tests" / "data" / "monitor_replay.json").read_text())
"""What the monitor said of the recorded runs before its rules became detectors."""
REPEATED = {
    "tests/data/demo_runs/collapse-0-llds.jsonl": (62, None),
    "tests/data/lab/llds5_0.jsonl": (36, 45),
}
"""Steps of alarms about a loss that an alarm before them had named, raised no more; and of those raised for a
further loss instead."""
SOONER = {"benchmarks/results/wiki_qa_0.5b/grpo_lr3e-5_s99.jsonl.gz": (24, 8)}
"""Steps of alarms that a plunge of the lag probe brought forward, before and now: of `likelihood`, and of
`acceleration` with it."""
REAL = {
    "grpo_lr1e-5_s100": [8], "grpo_lr1e-5_s101": [18], "grpo_lr1e-5_s102": [14],
    "llds_lr1e-5_s100": [], "llds_lr1e-5_s101": [], "llds_lr1e-5_s102": [],
}  # fmt: skip
"""Steps of `likelihood` alarms in paired runs of a real model: the first three collapse, at 13, 22 and 20."""
SICK = {
    "gradient": "gradient",
    "entropy to 6.6": "entropy_high",
    "entropy to .001": "entropy_low",
    "searches to 0": "interaction",
    "searches to the limit": "interaction",
    "searches to the limit, unexplained": "interaction",
    "valid to .1": "validity",
    "finished to .1": "validity",
    "mismatch": "mismatch",
    "groups without variance": "degenerate_groups",
    "groups that are all right": None,
    "truncation": "truncation",
    "length x 6": "length",
    "length / 6": "length",
    "reward gap": "reward_gap",
    "llds without active tokens": "silent_llds",
    "no documents": "retrieval",
    "titles alone": "retrieval",
    "the same documents": "retrieval",
    "garbage": "garbage",
    "control tokens": "control_tokens",
}


def alarms_of(run) -> list[Alarm]:
    monitor = PhaseMonitor()
    return [alarm for metrics in run for alarm in monitor.update(metrics).alarms]


@pytest.mark.parametrize("kind", SICK)
def test_each_sickness_is_named_by_its_rule_alone(kind):
    for seed in range(5):
        found = alarms_of(sick_run(kind, seed))
        assert {a.rule for a in found} == ({SICK[kind]} if SICK[kind] else set()), (
            seed,
            [a.seen for a in found],
        )
        assert all(a.step >= BEGINS and a.since <= a.step for a in found)


def test_tags_that_are_no_longer_written_are_seen_in_frozen_answers():
    """Those that are still written are the likely ones."""
    run = [
        {"step": s, "logp/control": -0.05, "probe/control": -0.05 if s < 40 else -2.0} for s in range(1, 61)
    ]
    (alarm,) = alarms_of(run)
    assert (alarm.rule, alarm.metric) == ("control_tokens", "probe/control") and 42 <= alarm.step <= 45


def test_a_state_from_before_a_rule_had_a_second_metric_is_taken_up():
    monitor = PhaseMonitor()
    for step in range(1, 35):
        monitor.update({"step": step, "logp/control": -0.05})
    kept = json.loads(json.dumps(monitor.state_dict()))
    kept["detectors"]["control_tokens"]["channels"].pop()
    resumed = PhaseMonitor()
    resumed.load_state_dict(kept)
    alarms = [a for s in range(35, 50) for a in resumed.update({"step": s, "logp/control": -2.0}).alarms]
    assert [a.rule for a in alarms] == ["control_tokens"]


@pytest.mark.parametrize("name", BEFORE)
def test_recorded_runs_raise_the_same_alarms_as_before_there_were_detectors(name):
    opened = gzip.open if name.endswith(".gz") else open
    with opened(ROOT / name, "rt", encoding="utf-8") as lines:
        run = [json.loads(line) for line in lines]
    old = {alarm["rule"] for recorded in BEFORE.values() for alarm in recorded} | {
        "leak",
        "nonfinite",
        "no_reward",
    }
    found = [
        {
            "rule": a.rule,
            "metric": a.metric,
            "step": a.step,
            "since": a.since,
            "cleared": a.cleared,
            "seen": a.seen,
        }
        for a in alarms_of(run)
        if a.rule in old
    ]
    gone, anew = {**REPEATED, **SOONER}.get(name, (None, None))
    expected = [alarm for alarm in BEFORE[name] if alarm["step"] != gone]
    assert [alarm for alarm in found if alarm["step"] != anew] == expected


@pytest.mark.parametrize("name", REAL)
def test_a_real_model_that_loses_its_answers_is_named_before_its_reward_falls(name):
    with gzip.open(
        ROOT / f"benchmarks/results/wiki_qa_0.5b/{name}.jsonl.gz", "rt", encoding="utf-8"
    ) as lines:
        run = [json.loads(line) for line in lines]
    assert [a.step for a in alarms_of(run) if a.rule == "likelihood"] == REAL[name]


def plunging(values, monitor=None):
    """Steps at which `likelihood` is raised, of a lag probe that runs at every second step."""
    monitor = monitor or PhaseMonitor()
    return [
        a.step
        for i, value in enumerate(values, 1)
        for a in monitor.update({"step": 2 * i, "probe/lag": value, "reward/mean": 0.3}).alarms
        if a.rule == "likelihood"
    ]


def test_two_readings_of_a_plunge_are_an_alarm_and_one_is_not():
    assert plunging([-0.01, -0.33, -0.33]) == [6]
    assert plunging([-0.01, -5.0, -0.01, -0.01]) == []
    assert plunging([-0.31, -0.31, -0.01]) == []


def test_a_plunge_of_a_noisy_probe_must_exceed_its_noise():
    noisy = [0.3, -0.3] * 6
    assert plunging([*noisy, -0.4, -0.4]) == []
    assert plunging([*noisy, -2.0, -2.0]) == [28]


def test_a_plunge_that_began_before_a_restart_is_taken_up():
    monitor = PhaseMonitor()
    assert plunging([-0.01, -0.5], monitor) == []
    resumed = PhaseMonitor()
    resumed.load_state_dict(json.loads(json.dumps(monitor.state_dict())))
    alarms = resumed.update({"step": 6, "probe/lag": -0.5, "reward/mean": 0.3}).alarms
    assert [(a.rule, a.since, a.confidence) for a in alarms if a.rule == "likelihood"] == [
        ("likelihood", 4, "high")
    ]


def replayed_row(name):
    """The row of docs/monitor_evidence.md: what the monitor of one sickness said of a recorded run, what is
    said now beside it, and what is no longer said."""
    opened = gzip.open if name.endswith(".gz") else open
    with opened(ROOT / name, "rt", encoding="utf-8") as lines:
        run = [json.loads(line) for line in lines]
    old = [(alarm["rule"], alarm["step"]) for alarm in BEFORE[name]]
    now = [(a.rule, a.step) for a in alarms_of(run)]
    added = [said for said in now if said not in old]
    gone = [said for said in old if said not in now]
    cells = [", ".join(f"`{rule}` {step}" for rule, step in said) or "-" for said in (old, added, gone)]
    return f"| {Path(name).name.split('.')[0]} | {len(run)} | {' | '.join(cells)} |"


def fallen_and_slipping(further):
    """The frozen answers fall by .3 at step 20, and stay there, below their best of the last 60 steps. The
    lag probe is well again for 15 steps, then it slips a little, and the frozen answers lose so much more."""
    run = []
    for step in range(1, 71):
        fixed = -0.06 * min(5, max(0, step - 20)) - further * min(1.0, max(0, step - 45) / 5)
        lag = -0.12 if 20 < step <= 28 else -0.02 if step > 43 else 0.0
        run.append({"step": step, "probe/lag": lag, "probe/fixed": fixed, "reward/mean": 0.5})
    return run


def test_one_loss_makes_one_alarm_and_a_further_loss_another():
    (first,) = alarms_of(fallen_and_slipping(0.0))
    assert (first.rule, first.cleared is not None) == ("likelihood", True)
    assert len(alarms_of(fallen_and_slipping(0.07))) == 1
    again, second = alarms_of(fallen_and_slipping(0.1))
    assert (again.step, second.rule, second.metric) == (first.step, "likelihood", "probe/fixed")
    assert 45 < second.step < 60
    monitor = PhaseMonitor()
    found = []
    for row in fallen_and_slipping(0.1):  # as a run that is killed, and goes on, at each step
        state = json.loads(json.dumps(monitor.state_dict()))
        monitor = PhaseMonitor()
        monitor.load_state_dict(state)
        found += monitor.update(row).alarms
    assert [a.step for a in found] == [first.step, second.step]


def test_the_page_says_what_the_detectors_changed_in_every_recorded_run():
    page = (ROOT / "docs" / "monitor_evidence.md").read_text(encoding="utf-8")
    table = page.partition("<!-- replay: begin -->")[2].partition("<!-- replay: end -->")[0]
    assert table.strip().splitlines()[2:] == [replayed_row(name) for name in BEFORE]


def test_a_state_goes_through_json_and_goes_on_exactly_where_it_was_taken():
    for kind in ("gradient", "reward gap", "llds without active tokens", "groups without variance"):
        run = sick_run(kind, 1)
        whole = [a.as_dict() for a in alarms_of(run)]
        first, second = PhaseMonitor(), PhaseMonitor()
        begun = [a for m in run[:150] for a in first.update(m).alarms]
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert [a.rule for a in second.open.values()] == [a.rule for a in first.open.values()]
        later = [a for m in run[150:] for a in second.update(m).alarms]
        assert [(a["rule"], a["step"]) for a in whole] == [(a.rule, a.step) for a in begun + later]


def test_one_wild_value_or_two_make_no_alarm():
    run = rows(healthy_run(3))
    for step in (120, 150, 151, 200):
        run[step] |= {"grad_norm": 5000.0, "mismatch/abs_logp": 9.0, "rollout/length": 1.0, "entropy": 0.0}
    assert alarms_of(run) == []


def test_an_alarm_ends_when_the_metric_is_back_and_stands_until_then():
    run = rows(healthy_run(4))
    for m in run[120:160]:
        m["rollout/valid"] = 0.2
    monitor = PhaseMonitor()
    states = [monitor.update(m) for m in run]
    (raised,) = [a for s in states for a in s.alarms]
    assert raised.rule == "validity" and 120 < raised.step < 130
    assert raised.cleared is not None and 160 < raised.cleared < 185


def test_a_level_that_is_held_becomes_the_usual_one():
    run = rows({k: v for k, v in healthy_run(5, 400).items()})
    for m in run[60:]:
        m["rollout/length"] *= 2  # below the threshold: no alarm, and the new usual level
    for m in run[300:]:
        m["rollout/length"] *= 2
    assert alarms_of(run) == []


def test_every_rule_reads_something_and_gives_advice():
    assert tuple(READS) == tuple(DETECTORS)
    for rule, detector in DETECTORS.items():
        assert detector.rule == rule and detector.reads
        assert detector.advice.format(since=7).rstrip().endswith(".")


def test_the_lanes_of_the_page_are_those_of_the_table():
    script = (ROOT / "services" / "likelihood" / "static" / "curves" / "page_lanes.js").read_text()
    table = re.search(r"U\.RULES = \{(.*?)\n  \};", script, re.S)[1]
    shown = {
        rule: tuple(re.findall(r'"(.*?)"', names)) for rule, names in re.findall(r"(\w+): \[(.*?)\]", table)
    }
    assert shown == READS and list(shown) == list(READS)


def test_healthy_is_earned_by_likelihood_and_reward():
    run = rows(healthy_run(6, 60))
    monitor = PhaseMonitor()
    phases = [monitor.update(m).phase for m in run]
    assert phases[0] == "unknown" and phases[-1] == "healthy"
    for needed in ("probe/lag", "reward/mean"):
        dropped = (
            ("probe/lag", "probe/fixed", "displacement/share_negative")
            if needed == "probe/lag"
            else (needed,)
        )
        monitor = PhaseMonitor()
        assert {monitor.update({k: v for k, v in m.items() if k not in dropped}).phase for m in run} == {
            "unknown"
        }


def test_names_that_nobody_knows_are_unknown():
    monitor = PhaseMonitor()
    assert {monitor.update({"step": i, "my/score": 0.9}).phase for i in range(60)} == {"unknown"}
    assert PHASES[-1] == "unknown", "codes in stores stay what they are"


def test_an_alarm_that_an_earlier_version_wrote_is_read():
    alarm = alarms_of(sick_run("valid to .1", 0))[0].as_dict()
    alarm["sure"] = alarm.pop("confidence")
    assert Alarm.of(alarm).confidence == alarm["sure"]
    assert "sure" not in Alarm.of(alarm).as_dict()


@pytest.mark.parametrize("rules", [{}, {"lag_nats": -0.5}], ids=["defaults", "a lag beyond the drop"])
def test_a_second_fall_is_named_whatever_the_thresholds(rules):
    """The frozen answers lose .4, hold, and lose .4 again; no lag probe. What an alarm has named counts again
    once as much as a drop needs was lost, and in any case after `memory_steps`."""
    level = [0.0] * 10 + [-0.04 * i for i in range(1, 11)] + [-0.4] * 80
    level += [-0.4 - 0.04 * i for i in range(1, 11)] + [-0.8] * 40
    monitor = PhaseMonitor(MonitorRules(**rules, memory_steps=30))
    found = [
        a.step
        for step, value in enumerate(level, 1)
        for a in monitor.update({"step": step, "probe/fixed": value, "reward/mean": 0.3}).alarms
        if a.rule == "likelihood"
    ]
    first, second = found
    assert 11 < first <= 20 and 101 < second <= 110
