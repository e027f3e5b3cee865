"""Averages, intervals and tests: against hand computations, printed tables and other libraries."""

import itertools
import json
import math

import numpy as np
import pytest
from suite_rows import asked, evaluation, row

from trainer.suite.result import powers_up_to, result_of
from trainer.suite.sets import SETS, QuestionSet, Suite
from trainer.suite.shown.published import LLDS, PUBLISHED
from trainer.suite.shown.tables import latex, markdown
from trainer.suite.statistics import Estimates, averages_of, pass_at_k, sign_test

MISPRINTED = {("Qwen2.5-7B", "IRCoT"): 0.226}
"""Rows whose printed average is not that of their seven figures: what these give."""


@pytest.mark.parametrize("printed", PUBLISHED, ids=lambda p: f"{p.model} {p.method}")
def test_the_papers_own_averages_come_out_of_their_per_set_figures(printed):
    """To .001: each figure of three digits is off by up to .0005, and so is the printed average."""
    averages = averages_of(printed.by_set)
    macro = MISPRINTED.get((printed.model, printed.method), printed.macro)
    assert averages["macro"] == pytest.approx(macro, abs=1e-3)
    if printed.paper == LLDS:
        assert averages["general"] == pytest.approx(printed.general, abs=1e-3)
        assert averages["multi_hop"] == pytest.approx(printed.multi_hop, abs=1e-3)


def test_a_row_that_is_noted_as_misprinted_is():
    rows = {(p.model, p.method): p for p in PUBLISHED}
    assert len(rows) == len(PUBLISHED) == 43
    assert all(abs(rows[key].macro - macro) > 0.01 for key, macro in MISPRINTED.items())


def test_an_average_of_which_a_set_is_missing_is_absent():
    assert averages_of({"nq": 0.1, "triviaqa": 0.2, "popqa": 0.6}) == {"general": pytest.approx(0.3)}


def test_the_averages_of_a_made_file_are_those_computed_by_hand(tmp_path):
    right = {
        "nq": [True] * 3 + [False],  # .75
        "triviaqa": [True, False],  # .5
        "popqa": [False],  # 0
        "hotpotqa": [True],  # 1
        "2wikimultihopqa": [True, True, False, False, False],  # .4
        "musique": [False, False],  # 0
        "bamboogle": [True, False],  # .5
    }
    folder = evaluation(tmp_path / "a", right)
    result = json.loads((folder / "result.json").read_text())
    mean = {name: result["averages"][name]["em"]["mean"] for name in result["averages"]}
    assert mean == {
        "general": pytest.approx(1.25 / 3),
        "multi_hop": pytest.approx(1.9 / 4),
        "macro": pytest.approx(3.15 / 7),
        "micro": pytest.approx(8 / 17),
    }
    assert result["n"] == 17 and result["sources"]["2wikimultihopqa"]["em"]["mean"] == pytest.approx(0.4)
    for part in (*result["sources"].values(), *result["averages"].values()):
        assert part["em"]["low"] <= part["em"]["mean"] <= part["em"]["high"]
    table = (folder / "table.md").read_text()
    assert "| EM | .750 (" in table and ".450 (" in table and ".471 (" in table
    tex = (folder / "table.tex").read_text().splitlines()
    ours = [line.split(" & ") for line in tex if line.endswith(r"\\") and not line.startswith((" &", "%"))]
    assert [line[0] for line in ours] == ["EM", "F1", "Sub-EM", "Strict EM", "EM (Search-R1)"]
    assert [line[1] for line in ours] == [".750"] * 5 and all(line[10] == ".450" for line in ours)
    row = (
        "| Qwen2.5-7B-Instruct, GRPO + LLDS (arXiv 2512.04220 v2) | .518 | .676 | .486 | .560 | .492 | .490 "
    )
    assert row + "| .228 | .492 | .426 | .483 | - |" in table.split("## As papers print it")[1]


def test_the_interval_of_a_share_is_that_of_the_binomial():
    """The bootstrap of n zeros and ones has the binomial's quantiles."""
    scores = np.array([1.0] * 30 + [0.0] * 70)[:, None]
    estimate = Estimates({"nq": scores}, resamples=20_000).of_set("nq")
    assert estimate["mean"] == 0.3
    assert (estimate["low"], estimate["high"]) == (
        pytest.approx(0.21, abs=0.011),
        pytest.approx(0.39, abs=0.011),
    )


def test_the_interval_of_the_macro_average_counts_each_set_the_same():
    """Variance of the mean of independent means: a small set decides it."""
    rng = np.random.default_rng(0)
    by_set = {
        name: rng.integers(0, 2, (n, 1)).astype(float) for name, n in zip(SETS, [400] * 6 + [20], strict=True)
    }
    macro = Estimates(by_set, resamples=4000).averages()["macro"]
    variance = sum(scores.var() / len(scores) for scores in by_set.values()) / 49
    assert macro["high"] - macro["low"] == pytest.approx(2 * 1.96 * math.sqrt(variance), rel=0.06)


def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_sample():
    for n, right, k in itertools.product((1, 3, 5), range(6), (1, 2, 3, 5)):
        if right > n or k > n:
            continue
        subsets = list(itertools.combinations([1] * right + [0] * (n - right), k))
        assert pass_at_k(n, right, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))
    with pytest.raises(ValueError, match="k=4"):
        pass_at_k(3, 1, 4)
    assert [powers_up_to(n) for n in (0, 1, 2, 5, 8)] == [[], [], [2], [2, 4, 5], [2, 4, 8]]


def test_sampled_mean_and_pass_at_k_of_made_rows():
    plan = [asked("nq", i, sample) for sample in range(3) for i in range(2)]
    answers = {("nq/q0", 1): "Rome", ("nq/q0", 2): "Oslo", ("nq/q1", 1): None, ("nq/q1", 2): "Oslo"}
    rows = [row(one, answers.get(one.key, "Oslo")) for one in plan]
    suite = Suite([QuestionSet("nq", "test", (plan[0].item, plan[1].item), 2, None)])
    result = result_of(suite, rows, 2, {"suite": "search7", "method": "agent", "model": {"name": "m"}})
    assert result["sources"]["nq"]["em"]["mean"] == 0 and result["sources"]["nq"]["n"] == 2
    assert result["sampled"]["mean"]["sources"]["nq"]["mean"] == 0.25
    assert result["sampled"]["pass@2"]["sources"]["nq"]["mean"] == 0.5
    assert "pass@2 (EM)" in markdown(result) and result["averages"].keys() == {"micro"}
    assert "No rows of TriviaQA, PopQA, HotpotQA" in markdown(result)
    tex = latex(result)
    assert "Sampled mean EM & .250 & -- & --" in tex and "pass@2 (EM) & .500 & -- & --" in tex


@pytest.mark.parametrize(
    ("wins", "losses"), [(0, 0), (1, 0), (7, 2), (2, 7), (40, 40), (700, 600), (3000, 2500)]
)
def test_the_exact_test_is_scipys(wins, losses):
    stats = pytest.importorskip("scipy.stats")
    expected = stats.binomtest(wins, wins + losses).pvalue if wins + losses else 1.0
    assert sign_test([1.0] * wins + [-1.0] * losses + [0.0] * 5) == (wins, losses, pytest.approx(expected))
