"""The figures of the GPU runs on the page are those of the committed files."""

import re

import pytest
from page_parts import between
from places import ROOT

from benchmarks.collapse.judged.findings import SPIKE, means_of_8
from benchmarks.collapse.judged.page import SHORT
from benchmarks.collapse_bench.causes import BENCH
from benchmarks.real_model.alarms import alarmed
from benchmarks.real_model.training import (
    FIRST_LOTS,
    HALF_RATE,
    SEEDS,
    first_alarm,
    halved,
    metrics,
    pair,
    pairs,
    runs,
    sign_test,
    table,
)

PAGE = (ROOT / "docs/study.md").read_text(encoding="utf-8")


def test_the_page_holds_the_table_and_the_paired_sentence_of_the_committed_runs():
    assert table() in PAGE
    assert pair() in " ".join(PAGE.split())
    assert pairs() in PAGE


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
    before, _, generated = known.partition(SHORT[0])  # which test_benchmarks_collapse_page.py compares
    known = before + generated.partition(SHORT[1])[2]
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
    said = "61 are answered by GRPO alone and 55 by LLDS alone (exact sign test, p = 0.64)"
    assert said in " ".join(rest.split())
    assert (
        "of 11 causes it helps under `stale_8` and harms under no cause; under the other 10 nothing" in bench
    )
    assert len(BENCH) - 1 == 11 and "laboratory, eleven causes" in known and "the other 10 nothing" in known
    gained = [
        line.split("|")[2:] for line in rest.splitlines() if line.startswith("| GRPO, rate 5e-06, seed")
    ]
    others = [cells for cells in gained if cells[0].strip() == "0 -> 15"]
    assert len(others) == 3 and 'gained there is the word "yes" to questions' in " ".join(known.split())


def series(name, key):
    return [(row["step"], row[key]) for row in metrics(name) if row.get(key) is not None]


def test_the_sentences_beside_the_tables_are_those_of_the_committed_runs():
    said = " ".join(PAGE.split())
    grpo = [f"grpo_lr1e-5_s{seed}" for seed in SEEDS]
    leads = [halved(metrics(name)) - first_alarm(name) for name in grpo]
    assert [first_alarm(name) for name in grpo] == [18, 18, 18] and leads == [-2, 6, 3]
    assert "led the reward's fall by 6 and 3 steps in two seeds and came 2 steps after it in one" in said
    assert [first_alarm(f"llds_lr1e-5_s{seed}") for seed in SEEDS] == ["none"] * 3
    assert dict(series(grpo[0], "probe/lag"))[6] == pytest.approx(-0.38, abs=0.005)
    assert "the lag probe had lost .38 nats per token by step 6" in said
    doubled = []
    for seed, name in zip(SEEDS, grpo, strict=True):
        before = [mean for step, mean in means_of_8(series(name, "entropy")) if step < halved(metrics(name))]
        if any(mean > SPIKE * min(before[: at + 1]) for at, mean in enumerate(before)):
            doubled.append(seed)
    assert (
        doubled == [101] and "Entropy doubled before the fall in one run of GRPO of three (seed 101" in said
    )
    rewards = [reward for _, reward in series("grpo_lr1e-5_s99", "reward/mean")]
    means = {end: sum(rewards[end - 5 : end]) / 5 for end in range(5, len(rewards) + 1)}
    assert max(means, key=means.get) == 29 and "the reward was highest at step 29 (mean of five)" in said
    searches = dict(series("grpo_lr3e-5_s99", "rollout/searches"))
    assert searches[5] == 0 and "stopped searching within five steps" in said
    alarms = {alarm["rule"]: alarm["step"] for alarm in reversed(runs()["grpo_lr3e-5_s99"]["alarms"])}
    assert (alarms["dead_batch"], alarms["likelihood"]) == (12, 24)
    now = next(one for one in alarmed() if one.name == "grpo_lr3e-5_s99")
    assert now.likelihood == (8,)
    assert "came after `dead_batch` (step 12), then at 24; with the rule added since, at 8." in said


def test_the_sentences_on_the_fixed_probe_are_those_of_the_runs():
    said = " ".join(PAGE.split())
    ends = {
        name: (round(found[0][1], 2), round(found[-1][1], 2))
        for file in (FIRST_LOTS, HALF_RATE)
        for name in runs(file)
        if (found := series(name, "probe/fixed"))
    }
    first = [begin for name, (begin, _) in ends.items() if name != "grpo_lr3e-5_s99"]
    assert (min(first), max(first), ends["grpo_lr3e-5_s99"][0]) == (-0.08, -0.02, -0.68)
    assert "At step 2 it is -.02 to -.08, and -.68 at 3e-5." in said
    assert (ends["grpo_lr3e-6_s0"], ends["llds_lr3e-6_s0"]) == ((-0.04, -0.56), (-0.03, -0.04))
    assert "go from -.04 to -.56 nats per token under GRPO and from -.03 to -.04 with LLDS" in said


def test_what_exact_match_did_at_the_high_rate_is_that_of_the_runs():
    said = " ".join(PAGE.split())
    every = [one for file in (FIRST_LOTS, HALF_RATE) for one in runs(file).values()]
    gained = [greedy_gain(run) for run in every if run["lr"] == 1e-5]
    assert 681 * max(gained) == pytest.approx(1) and len(gained) == 9
    assert "no run gained more than one right answer of 681 by greedy decoding at the high rate" in said
    low = [greedy_gain(run) for run in every if run["lr"] == 3e-6]
    assert 681 * min(low) > 24 and len(low) == 2 and "the lower one (3e-6) both arms gained dozens" in said
    sampled = [
        [runs()[f"llds_lr1e-5_s{seed}"]["evaluations"][f"{when}_sampled"]["overall"]["em"] for seed in SEEDS]
        for when in ("before", "after")
    ]
    ranges = [f"{min(one):.3f} to {max(one):.3f}" for one in sampled]
    assert ranges == ["0.164 to 0.186", "0.236 to 0.253"]
    assert "the sampled one rose (.164 to .186 before, .236 to .253 after)" in said


def test_the_scores_and_habits_that_the_page_names_are_those_of_the_runs():
    said = " ".join(PAGE.split())
    ends = {
        arm: [runs()[f"{arm}_lr1e-5_s{s}"]["evaluations"]["after_greedy"]["overall"]["em"] for s in SEEDS]
        for arm in ("grpo", "llds")
    }
    llds = [f"{em:.2f}".lstrip("0") for em in ends["llds"]]
    grpo = [f"{em:.2f}".lstrip("0") for em in ends["grpo"]]
    assert f"went from .29 to {llds[0]}, {llds[1]} and {llds[2]} all the same" in said
    assert f"(from .29 to {llds[0]}, {llds[1]} and {llds[2]}) at a rate at which plain GRPO fell to" in said
    assert f"fell to {grpo[0]}, {grpo[1]} and {grpo[2]}" in said
    before = {
        seeds: [
            r["evaluations"]["before_greedy"]["overall"]["em"] for r in runs().values() if r["seed"] in seeds
        ]
        for seeds in ((0, 99), SEEDS)
    }
    low, high = (f"{min(b):.3f} to {max(b):.3f}".replace("0.", ".") for b in before.values())
    assert (len(before[0, 99]), len(before[SEEDS])) == (4, 6)
    assert f"{low} and {high} are the noise of batched bfloat16 arithmetic" in said
    low_rate = [runs()[f"{arm}_lr3e-6_s0"]["evaluations"] for arm in ("grpo", "llds")]
    first, second, third, fourth = (
        f"{one[when]['overall']['em']:.3f}".lstrip("0")
        for when in ("before_greedy", "after_greedy")
        for one in low_rate
    )
    assert f"both arms learned, from {first} and {second} to {third} and {fourth}" in said
    searches = [metrics(f"{arm}_lr1e-5_s{seed}")[-10:] for arm in ("grpo", "llds") for seed in SEEDS]
    means = [sum(row["rollout/searches"] for row in rows) / 10 for rows in searches]
    assert [round(mean, 1) for mean in means] == [0.0, 3.0, 0.0, 1.0, 1.0, 1.0]
    assert "All three of LLDS-A search once" in said and "seed 102 guesses without a search" in said
    assert "asks the retriever nothing" in said and "until its turns are over" in said


def greedy_gain(run):
    before, after = (run["evaluations"][f"{when}_greedy"]["overall"]["em"] for when in ("before", "after"))
    return after - before


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
    right = "by greedy decoding .29 of the answers were right before training, and .25, .27 and .25 after"
    assert right in said
    ends = {
        run["seed"]: run["evaluations"]["after_greedy"]["overall"]["em"]
        for run in found
        if run["llds.lambda"]
    }
    assert [f"{ends[seed]:.2f}" for seed in SEEDS] == ["0.25", "0.27", "0.25"]
    bench = (ROOT / "docs/collapse_bench.md").read_text(encoding="utf-8")
    assert (
        "252 short laboratory runs with three seeds per cell, LLDS-A helps under one cause of eleven" in said
    )
    assert "of 11 causes it helps under `stale_8` and harms" in bench


def bench_row(page, cause):
    """The row of a cause in CollapseBench's table of effects."""
    effects = between(page, "<!-- collapse bench: begin -->", "### Where LLDS helps and where it loses")
    (row,) = [line for line in effects.splitlines() if line.startswith(f"| `{cause}` | 3 |")]
    return row
