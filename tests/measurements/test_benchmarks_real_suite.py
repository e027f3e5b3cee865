"""The tables and figures of docs/evaluation_measured.md of a real model before and after training."""

import pytest
from places import ROOT

from benchmarks.real_model.suite import (
    COMPARED,
    WARM,
    by_kind,
    difference,
    differences,
    kinds,
    suite,
    table,
)
from benchmarks.real_model.training import HALF_RATE, metrics, runs, yes_or_no
from trainer.suite.sets import GENERAL, MULTI_HOP, SETS
from trainer.suite.statistics import averages_of

PAGE = (ROOT / "docs/evaluation_measured.md").read_text(encoding="utf-8")
SECTION = " ".join(
    PAGE.split("## Before and after training")[1].split("\n`unspiral eval` without")[0].split()
)


def test_the_page_holds_the_tables_of_the_committed_scores():
    for one in (table(), differences(), kinds()):
        assert one in PAGE


def test_the_estimates_are_those_of_the_marks():
    for name, one in suite()["evaluations"].items():
        assert list(one["right"]) == list(SETS)
        assert sum(map(len, one["right"].values())) == one["n"]
        if one["em"] is None:
            continue
        means = {name: marks.count("1") / len(marks) for name, marks in one["right"].items()}
        every = "".join(one["right"].values())
        expected = means | averages_of(means) | {"micro": every.count("1") / len(every)}
        assert {key: cell["mean"] for key, cell in one["em"].items()} == pytest.approx(expected, abs=1e-6)
        assert all(cell["low"] <= cell["mean"] <= cell["high"] for cell in one["em"].values()), name
        assert {key: len(marks) for key, marks in one["right"].items()} == {
            key: about["n"] for key, about in suite()["sets"].items()
        }
    assert (set(GENERAL) | set(MULTI_HOP)) == set(SETS)


def test_no_question_and_no_answer_of_the_data_is_committed():
    """Of each question a mark alone."""
    for one in suite()["evaluations"].values():
        assert all(set(marks) <= {"0", "1"} for marks in one["right"].values())
        assert set(one) == {
            *("model", "run", "method", "weights", "n", "finish", "without_an_answer", "searches"),
            *("answer_tag", "search_tag", "right", "em", "said_yes"),
        }
    assert set(suite()) == {"yes_no", "machine", "sets", "protocol", "evaluations"}
    assert "prompt_example" not in suite()["protocol"]


def test_the_sentences_are_those_of_the_committed_scores():
    found = suite()["evaluations"]
    fallen = found["grpo_s100_agent"]
    assert (fallen["n"], "1" in "".join(fallen["right"].values()), fallen["em"]) == (427, False, None)
    assert "after 427 questions, none of them right" in SECTION
    of_run = runs(HALF_RATE)["grpo_lr1e-5_s100_again"]
    assert (of_run["steps"], of_run["evaluations"]["after_greedy"]["overall"]["em"]) == (34, 0.0)
    rewards = {row["step"]: row["reward/mean"] for row in metrics("grpo_lr1e-5_s100_again")}
    assert {step: round(256 * reward) for step, reward in rewards.items() if step >= 22 and reward} == {
        22: 2,
        28: 1,
    }
    assert "0 from step 23 on, but for one answer of 256 in step 28" in SECTION
    steps = [runs(HALF_RATE)[found[name]["run"]]["steps"] for name in COMPARED]
    assert (min(steps), max(steps)) == (46, 50) and "have 46 to 50 steps" in SECTION
    cot = found["warm_cot"]
    assert (cot["search_tag"], cot["answer_tag"], cot["without_an_answer"]) == (681, 6, 681)
    lost = [found[f"warm_{method}"]["without_an_answer"] for method in ("direct", "rag", "search-o1")]
    assert (
        lost == [160, 34, 313] and "lose 160 and 34 answers" in SECTION and "turns are over, 313" in SECTION
    )
    assert found["untrained_cot"]["without_an_answer"] == 451 and "no answer in 451 of 681" in SECTION
    assert round(found["untrained_agent"]["searches"] * 681) == 20 and "searched 20 times" in SECTION
    assert 681 - found["untrained_rag"]["answer_tag"] == 672 and "in 672 of 681 texts" in SECTION


def test_what_training_gained_is_one_word():
    asked = suite()["yes_no"]
    assert {name: marks.count("1") for name, marks in asked.items() if "1" in marks} == {
        "2wikimultihopqa": 24,
        "hotpotqa": 6,
    }
    assert "".join(asked.values()).count("1") == yes_or_no().count("1") == 30
    ps = []
    for name in COMPARED:
        found, of_all = by_kind(name), difference(name)["tested"]
        assert found["yes_no"][0] == 15 and suite()["evaluations"][name]["said_yes"]["yes_no"] == 30
        assert of_all["all"][2] > 0.19
        ps.append(of_all["2wikimultihopqa"][2])
    assert (f"{min(ps):.2g}", f"{max(ps):.2g}") == ("0.00032", "0.049") and "(p .00032 to .049)" in SECTION
    others = [by_kind(name)["others"][0] - by_kind(WARM)["others"][0] for name in COMPARED]
    assert others == [-15, -1, -1, 2]
    assert "gained 15 right answers by a word, and between -1 and 2 elsewhere" in SECTION
    assert "gained the same 15 and lost 15 elsewhere" in SECTION
