"""The figures of the GPU runs on the page are those of the committed files."""

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
