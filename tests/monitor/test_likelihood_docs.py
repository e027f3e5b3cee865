"""docs/monitor.md, and the pages of its evidence and of its service, say what is."""

from __future__ import annotations

import json
import re

from likelihood_series import fall, healthy
from page_parts import rows, section
from places import ROOT
from sick_runs import healthy_run
from sick_runs import rows as rows_of
from test_likelihood_detectors import SICK, alarms_of
from test_likelihood_replay import replay

from services.likelihood.monitor.alarms import PHASES
from services.likelihood.monitor.detectors.table import READS
from services.likelihood.monitor.phases import PhaseMonitor
from services.likelihood.records import StepRecord
from services.settings import MonitorRules

PAGE = (ROOT / "docs" / "monitor.md").read_text(encoding="utf-8")
EVIDENCE = (ROOT / "docs" / "monitor_evidence.md").read_text(encoding="utf-8")
SERVICE = (ROOT / "docs" / "likelihood_service.md").read_text(encoding="utf-8")


def first_alarms(run):
    monitor = PhaseMonitor()
    return [a.step for m in run for a in monitor.update(m).alarms if a.rule == "likelihood"]


def lab(name, folder="lab"):
    return first_alarms(
        map(json.loads, (ROOT / "tests" / "data" / folder / f"{name}.jsonl").read_text().splitlines())
    )


def test_the_table_of_recorded_runs_is_what_the_monitor_does():
    shown = [re.findall(r"\d+", cells[1]) for cells in rows(EVIDENCE, "| GRPO", "| LLDS .5, lr")]
    names = [("g15n_0", "g15n_1"), ("grpo_0", "grpo_1", "grpo_2"), ("padmask_g15_0",), ("llds5_0", "llds5_1")]
    for cells, runs in zip(shown, names, strict=True):
        found = [
            str(step)
            for name in runs
            for step in lab(name)[: 2 if name in ("g15n_0", "padmask_g15_0") else 1]
        ]
        assert cells == found, runs
    assert all(lab(name) == [] for name in ("l15n_0", "l15n_1", "llds5_2"))


def test_the_table_of_new_runs_is_what_the_monitor_does():
    shown = [re.findall(r"\d+", cells[1]) for cells in rows(EVIDENCE, "| plain GRPO", "| LLDS .5, seed")]
    names = ("0-grpo", "1-grpo", "2-grpo", "1-llds", "2-llds", "0-llds")
    found = {name: [str(s) for s in lab(f"collapse-{name}", "demo_runs")] for name in names}
    assert shown == [
        found["0-grpo"] + found["1-grpo"] + found["2-grpo"],
        *(found[name] for name in names[3:]),
    ]


def test_the_leads_of_made_up_runs_are_as_stated():
    for rate, delay, low, high in ((0.04, 6, 1, 3), (0.02, 15, 7, 12), (0.01, 60, 55, 62)):
        for seed in range(10):
            run, lost = fall(seed, rate=rate, delay=delay)
            assert low <= lost - first_alarms(run)[0] <= high
    assert all(first_alarms(healthy(seed, lag_noise=0.05)) == [] for seed in range(10))


def test_phases_and_thresholds_named_there_exist():
    rules = MonitorRules()
    for phase in PHASES:
        assert f"| {phase} |" in PAGE
    for stated, value in (
        ("-.08", rules.lag_nats),
        ("-.015", rules.flat_nats),
        (".15 nats", rules.fixed_drop_nats),
        ("-.25", rules.acceleration_nats),
    ):
        assert stated in PAGE and float(stated.split()[0]) == value


def test_every_rule_has_its_row_with_the_metrics_it_reads():
    of_rule = {
        row.split("`")[1]: row
        for row in PAGE.splitlines()
        if re.match(r"\| `\w+` \| ", row) and row.count(" | ") == 5
    }
    assert list(READS) == [rule for rule in of_rule if rule in READS]
    for rule, reads in READS.items():
        cells = of_rule[rule].split(" | ")
        assert len(cells) == 6
        if rule != "acceleration":  # "the same"
            assert all(f"`{name}`" in cells[2] for name in reads), rule


def test_the_numbers_of_made_up_sick_and_healthy_runs_are_as_stated():
    (kinds,) = map(int, re.findall(r"one of (\d+) sicknesses", EVIDENCE))
    assert kinds == sum(rule is not None for rule in SICK.values())
    (stated,) = map(int, re.findall(r"\| (\d+) alarms in 30,000 steps", EVIDENCE))
    found = [a for seed in range(100) for a in alarms_of(rows_of(healthy_run(seed, 300)))]
    assert len(found) == stated <= 30


def test_the_example_post_is_accepted():
    (body,) = re.findall(r"/steps -H \S+ \S+ -d '(.*?)'\n", section(SERVICE, "For any trainer"), re.S)
    record = StepRecord.model_validate_json(body)
    assert record.trajectories[0].actions[0].documents == ["d7"]


def test_the_keys_of_a_replay_are_those_that_it_prints():
    printed = replay(ROOT / "tests" / "data" / "lab" / "grpo_0.jsonl")
    told = section(PAGE, "Judge a recorded run")
    keys = "\n".join(line.split(" | ")[0] for line in told.splitlines() if line.startswith("| `"))
    assert re.findall(r"`(\w+)`", keys) == list(printed)
    assert "`first`, `last`, `phase`" in told and set(printed["phases"][0]) == {"first", "last", "phase"}
    (form,) = re.findall(r"Each has (.+?)\. `confidence` is", " ".join(PAGE.split()))
    assert set(printed["alarms"][0]) == {*re.findall(r"`(\w+)`", form), "cleared"}
    assert "`cleared`, the step at which it ended" in told
