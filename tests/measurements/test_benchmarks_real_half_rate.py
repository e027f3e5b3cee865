"""The section of docs/study.md on half the rate: tables and sentences of the committed runs."""

import pytest
from places import ROOT

from benchmarks.real_model.curves import drawing, probe, reward
from benchmarks.real_model.training import (
    FIRST_LOTS,
    HALF_RATE,
    SEEDS,
    by_kind,
    first_alarm,
    half_rate,
    halved,
    metrics,
    right_after,
    runs,
    table,
    yes_or_no,
)

PAGE = (ROOT / "docs/study.md").read_text(encoding="utf-8")
SECTION = PAGE.split("### Half the rate, three seeds\n")[1].split("\n## ")[0]
SAID = " ".join(SECTION.split())
HALF = [f"grpo_lr5e-6_s{seed}" for seed in SEEDS]


def exact_match(run, key):
    return run["evaluations"][key]["overall"]["em"]


def test_the_page_holds_the_tables_of_the_committed_runs():
    for one in (table(HALF_RATE), half_rate(), by_kind()):
        assert one in SECTION


def test_exact_match_is_the_share_of_the_marks_and_each_step_has_its_metrics():
    for name, run in runs(HALF_RATE).items():
        assert [row["step"] for row in metrics(name)] == list(range(1, run["steps"] + 1))
        for key, right in run["right"].items():
            assert right.count("1") / len(right) == pytest.approx(exact_match(run, key), abs=1e-12)
            assert len(right) == len(yes_or_no()) == 681


def test_the_sentences_on_half_the_rate_are_those_of_the_runs():
    found = runs(HALF_RATE)
    assert {(found[name]["lr"], found[name]["llds.lambda"]) for name in HALF} == {(5e-6, 0.0)}
    steps = [found[name]["steps"] for name in HALF]
    assert (min(steps), max(steps)) == (46, 50) and "within its 46 to 50 steps" in SAID
    assert [halved(metrics(name)) for name in HALF] == ["never"] * 3
    at_full_rate = [f"grpo_lr1e-5_s{seed}" for seed in SEEDS] + ["grpo_lr1e-5_s100_again"]
    assert max(halved(metrics(name)) for name in at_full_rate) <= 46
    assert [first_alarm(name, HALF_RATE) for name in HALF] == ["none", 28, "none"]
    assert "In seed 101 at half the rate the `likelihood` alarm came at step 28" in SAID
    probes = [row["probe/fixed"] for row in metrics(HALF[1]) if row.get("probe/fixed") is not None]
    assert [round(value, 2) for value in (probes[0], probes[-1])] == [-0.06, -0.35]
    assert "right answers frozen in the first steps had gone from -.06 to -.35 nats per token" in SAID
    again = "grpo_lr1e-5_s100_again"
    assert halved(metrics(again)) - first_alarm(again, HALF_RATE) == 6
    assert "came at step 18 again, here 6 steps before" in SAID and first_alarm(again, HALF_RATE) == 18
    held = found["llds_lr1e-5_s100_again"]
    assert f"{exact_match(held, 'before_greedy'):.3f}" == "0.289"
    assert f"{exact_match(held, 'after_greedy'):.3f}" == "0.291" and "(.289 -> .291)" in SAID


def test_the_sentences_on_what_was_learned_are_those_of_the_runs():
    asked = yes_or_no()

    def others(name, file, when):
        right = runs(file)[name]["right"][f"{when}_greedy"]
        return sum(mark == "1" for mark, kind in zip(right, asked, strict=True) if kind == "0")

    def gained(name, file):
        return others(name, file, "after") - others(name, file, "before")

    assert [gained(name, HALF_RATE) for name in HALF] == [-3, -2, -2]
    assert "gives 2 or 3 fewer right answers than before" in SAID
    low = [gained(f"{arm}_lr3e-6_s0", FIRST_LOTS) for arm in ("grpo", "llds")]
    assert low == [44, 46] and "44 and 46 more right answers on the other questions" in SAID
    for name in HALF:
        answers = right_after(name, HALF_RATE)
        assert sum(mark == kind == "1" for mark, kind in zip(answers, asked, strict=True)) == 15
    found = runs(HALF_RATE)
    sampled = [[exact_match(found[n], f"{when}_sampled") for n in HALF] for when in ("before", "after")]
    assert [f"{min(one):.2f} to {max(one):.2f}" for one in sampled] == ["0.18 to 0.20", "0.30 to 0.31"]
    llds = [exact_match(runs()[f"llds_lr1e-5_s{seed}"], "after_greedy") for seed in SEEDS]
    llds.append(exact_match(found["llds_lr1e-5_s100_again"], "after_greedy"))
    assert f"{min(llds):.3f} to {max(llds):.3f}" == "0.245 to 0.291" and ".245 to .291" in SAID
    half = [exact_match(found[name], "after_greedy") for name in HALF]
    assert f"{min(half):.3f} to {max(half):.3f}" == "0.305 to 0.311" and ".305 to .311" in SAID


def test_the_curves_are_drawn_from_the_committed_metrics():
    assert (ROOT / "docs/images/real_model.svg").read_text(encoding="utf-8") == drawing()
    assert "(images/real_model.svg)" in SECTION
    assert drawing().count("<polyline") == 2 * (len(runs()) + len(runs(HALF_RATE)))
    rows = metrics(HALF[0])
    assert reward(rows)[0] == (5, pytest.approx(sum(row["reward/mean"] for row in rows[:5]) / 5))
    assert probe(rows)[0] == (2, rows[1]["probe/fixed"])
    assert min(value for _, value in probe(metrics("grpo_lr3e-5_s99"))) == -2.0
