"""The figures of the GPU runs on the page are those of the committed files."""

import re

import pytest
from places import ROOT

from benchmarks.real_model import pair, runs, sign_test, table

PAGE = (ROOT / "docs/study.md").read_text(encoding="utf-8")


def test_the_page_holds_the_table_and_the_paired_sentence_of_the_committed_runs():
    assert table() in PAGE
    assert pair() in " ".join(PAGE.split())


def test_exact_match_is_the_share_of_the_paired_answers():
    for run in runs().values():
        for key, right in run["right"].items():
            overall = run["evaluations"][key]["overall"]
            assert right.count("1") / len(right) == pytest.approx(overall["em"], abs=1e-12)
            assert len(right) == overall["n"]


def test_the_sign_test_is_the_binomial_one():
    assert sign_test("1110", "0001") == (3, 1, pytest.approx(0.625))
    assert sign_test("11111", "00000") == (5, 0, pytest.approx(0.0625))


def test_each_figure_of_what_is_known_today_stands_in_a_table_that_it_names():
    opening, rest = PAGE.split("\n## The planned study\n")
    known = opening.split("## What is known today")[1]
    bench = (ROOT / "docs/collapse_bench.md").read_text(encoding="utf-8")
    cells = re.findall(r"[+-]\d\.\d\d \([^)]+\)", known)
    assert len(cells) == 7
    named = {"high_rate": cells[:3], "none": cells[3:5], "stale_8": cells[5:]}
    for cause, figures in named.items():
        assert all(figure in bench_row(bench, cause) for figure in figures), cause
    scores = re.findall(r"\b0\.\d{3}\b", known)
    assert len(scores) == 10
    tables = [line for line in rest.splitlines() if line.startswith("| ")]
    for score in scores:
        assert any(score in row for row in tables), score
    assert "61 are answered by GRPO alone and 55 by LLDS alone (exact sign test, p = 0.64)" in rest
    assert "it helps under `stale_8` and harms under no cause; under the other 11 nothing was shown" in bench


def test_the_readme_claims_what_the_committed_runs_show():
    said = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    found = [run for run in runs().values() if run["lr"] == 1e-5 and run["seed"] in (100, 101, 102)]
    assert len(found) == 6
    for run in found:
        before, after = (
            run["evaluations"][f"{when}_greedy"]["overall"]["em"] for when in ("before", "after")
        )
        assert after < before
        assert (run["phase"] == "collapsed") == (run["llds.lambda"] == 0)
    assert "three of three paired runs of GRPO collapsed and none of three with LLDS did" in said
    bench = (ROOT / "docs/collapse_bench.md").read_text(encoding="utf-8")
    assert (
        "252 short laboratory runs with three seeds per cell, LLDS-A helps under one cause of twelve" in said
    )
    assert "of 12 causes it helps under `stale_8` and harms" in bench


def bench_row(page, cause):
    """The first row of CollapseBench's table of effects that has this cause."""
    return next(line for line in page.splitlines() if line.startswith(f"| `{cause}` | 3 |"))
