"""docs/study.md is generated from the committed results; its rows and sentences follow from made-up runs by
rules worked out by hand."""

from __future__ import annotations

import statistics

import pytest
from places import ROOT

from benchmarks.collapse.__main__ import main
from benchmarks.collapse.judged.collected import RESULTS, Result, read_all, repeats_of
from benchmarks.collapse.judged.findings import arms_there, in_short, paper_table, signs, user_lines
from benchmarks.collapse.judged.outcomes import planned
from benchmarks.collapse.judged.page import FIRST, LAST, SHORT, block, write_page
from benchmarks.collapse.judged.sameness import mixed
from benchmarks.collapse.judged.tables import PRIMARY, complete, paired, verdict
from benchmarks.collapse.planned.arms import ARMS, SEEDS
from services.common.errors import UserError

PAGE = ROOT / "docs" / "study.md"


def made_up(arm, seed, em, series=None):
    """150 quiet steps; series: by metric, a function of the step."""
    quiet = {"reward/mean": 0.5, "grad_norm/max": 1.0, "probe/fixed": -0.1, "entropy": 0.2}
    quiet |= {"displacement/share_negative": 0.25, "rollout/searches": 2.0, "rollout/length": 20.0}
    made = {key: value(0) if callable(value) else value for key, value in quiet.items()}
    rows = [
        {"step": step} | made | {key: value(step) for key, value in (series or {}).items()}
        for step in range(1, 151)
    ]
    header = {"arm": arm, "seed": seed, "died": False, "warm_start": "w"}
    return Result(header, rows, dict.fromkeys(planned(), em), dict.fromkeys(planned(), em))


def arm(name, base, series=None):
    return {seed: made_up(name, seed, base + (seed % 3) / 100, series) for seed in SEEDS}


FALLING = {
    "probe/fixed": lambda step: -0.1 if step < 40 else -0.3,
    "reward/mean": lambda step: 0.5 if step < 80 else 0.1,
    "grad_norm/max": lambda step: 11.0 if step == 90 else 1.0,
    "entropy": lambda step: 0.2 if step < 60 else 0.5,
    "displacement/share_negative": lambda step: 0.75,
}


def test_the_page_is_that_of_the_committed_results():
    shown = PAGE.read_text(encoding="utf-8").partition(FIRST)[2].partition(LAST)[0].strip()
    made = block(read_all(), read_all(repeats_of(RESULTS)))
    short = PAGE.read_text(encoding="utf-8").partition(SHORT[0])[2].partition(SHORT[1])[0].strip()
    assert short == in_short(read_all())
    assert shown == made, "run: python -m benchmarks.collapse tables --page docs/study.md"


def test_the_signs_of_a_run_by_hand():
    found = signs(made_up("grpo", 100, 0.2, FALLING))
    # The mean of 8 rewards is under .85 x .5 with two of .1 (.4); that of entropies is .4125 with five of .5.
    assert (found.probe, found.reward, found.gradient, found.entropy) == (40, 81, 90, 65)
    assert found.mostly_falling and found.collapsed and found.in_order
    quiet = signs(made_up("grpo", 100, 0.2))
    assert (quiet.probe, quiet.reward, quiet.gradient, quiet.entropy) == (None, None, None, None)
    assert not (quiet.mostly_falling or quiet.collapsed or quiet.in_order)
    late = signs(made_up("grpo", 100, 0.2, FALLING | {"probe/fixed": lambda s: -0.1 if s < 95 else -0.3}))
    assert late.probe == 95 and not late.in_order


def test_claims_of_the_paper_are_counted_over_the_runs_of_plain_grpo():
    runs = {seed: made_up("grpo", seed, 0.2, FALLING if seed < 108 else None) for seed in SEEDS}
    rows = paper_table({"grpo": runs}).splitlines()[2:]
    assert len(rows) == 7
    # Runs of half the paper's steps that did not collapse do not speak against a collapse by its last step.
    first, *others = [row.rsplit("|", 2)[1].strip() for row in rows]
    assert first == "not shown: the others could still collapse"
    assert others == ["mostly fits"] * 4 + ["-"] * 2
    assert "8 of 10 runs of plain GRPO" in rows[0] and "not run yet: llds_0.5, llds_0.2" in rows[5]
    everywhere = paper_table({"grpo": arm("grpo", 0.2, FALLING)}).splitlines()[2:7]
    nowhere = paper_table({"grpo": arm("grpo", 0.2)}).splitlines()[2:7]
    assert all(row.endswith("| fits |") for row in everywhere)
    assert nowhere[0].endswith("could still collapse |")
    assert all(row.endswith("| does not fit |") for row in nowhere[1:])
    assert "not run yet: grpo" in paper_table({})


def test_an_order_fits_only_where_all_intervals_lie_above_0():
    better, worse = arm("llds_0.5", 0.6), arm("llds_0.5", 0.1)
    others = {"grpo": arm("grpo", 0.2), "llds_0.2": {s: made_up("llds_0.2", s, 0.3) for s in SEEDS}}
    assert paper_table(others | {"llds_0.5": better}).splitlines()[-2].endswith("| fits |")
    assert paper_table(others | {"llds_0.5": worse}).splitlines()[-2].endswith("| does not fit |")


def test_a_user_is_told_what_the_intervals_say_and_what_is_not_known():
    results = {"grpo": arm("grpo", 0.2), "llds_0.5": arm("llds_0.5", 0.2), "half_grpo": arm("half_grpo", 0.5)}
    results["llds_0.5"] = {s: made_up("llds_0.5", s, 0.2 + (-1) ** s / 50) for s in SEEDS}
    when, lam, first, better, both = user_lines(results)
    assert "an effect of LLDS-A .5 on exact match was not shown" in when and "10 pairs" in when
    assert when.endswith(
        "more or less with it was not shown (fall of the fixed probe, nats per token: +0.000 "
        "(+0.000 to +0.000), 10 pairs, p 1.00 by Holm)."
    )
    kept = {s: made_up("grpo", s, 0.2, FALLING) for s in SEEDS}
    # The probe ends .2 below its best in grpo alone.
    assert (
        "fell less with it (fall of the fixed probe, nats per token: -0.200 ("
        in user_lines(results | {"grpo": kept})[0]
    )
    assert lam.endswith("Not known yet: llds_0.2 is not complete.")
    assert "Halve the learning rate: without LLDS that raised exact match" in first and "+0.300" in first
    assert "No, half the rate without LLDS had the higher exact match" in better
    assert both.endswith("Not known yet: half_llds_0.5 is not complete.")
    assert len(user_lines({})) == 5 and all("Not known yet" in line for line in user_lines({}))


def test_the_page_names_the_arms_that_are_missing_and_those_that_lack_seeds():
    part = {100: made_up("llds_0.2", 100, 0.3)}
    text = arms_there({"grpo": arm("grpo", 0.2), "llds_0.2": part})
    assert text.startswith(f"1 of {len(ARMS)} arms have all 10 seeds. Complete: `grpo`. `llds_0.2` has 1 ")
    assert "Missing: `llds_0.5`, `half_grpo`, " in text and "`interleaved_sft`." in text


def test_a_page_with_all_arms_of_the_claim_has_the_verdict_and_the_secondary_outcomes():
    results = {name: arm(name, em) for name, em in (("grpo", 0.2), ("llds_0.5", 0.4), ("half_grpo", 0.3))}
    results["grpo"] = {s: made_up("grpo", s, 0.2) for s in SEEDS}
    results["half_grpo"] = {s: made_up("half_grpo", s, 0.3) for s in SEEDS}
    text = block(results)
    assert "Not refuted." in text and "| llds_0.5 - half_grpo |" in text
    assert text.count("| half_grpo - grpo |") == 1  # of the secondary outcomes
    assert len({line.count("|") for line in text.splitlines() if line.startswith("| llds_0.5 - ")}) == 1


def test_the_command_writes_between_the_marks_and_nowhere_else(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"a\n{FIRST}\nSTALE\n{LAST}\nb\n")
    assert main(["tables", "--results", str(tmp_path), "--page", str(page)]) == 0
    text = page.read_text()
    assert text.startswith(f"a\n{FIRST}\nA run has 150 steps") and text.endswith(f"{LAST}\nb\n")
    assert "STALE" not in text and "Undecided" in text
    page.write_text(f"{SHORT[0]}\nOLD\n{SHORT[1]}\n{FIRST}\n{LAST}\n")
    write_page({}, page)
    short = page.read_text().partition(SHORT[1])[0]
    assert "OLD" not in short and "Undecided: not all ten seeds of grpo" in short
    page.write_text("no marks")
    with pytest.raises(UserError, match="expected the lines"):
        write_page({}, page)


def test_the_readme_says_what_the_plan_s_rule_found():
    said = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    results = read_all(RESULTS)
    for arm, control, words in (
        ("llds_0.5", "grpo", "The difference to plain GRPO was"),
        ("llds_0.5", "half_grpo", "and that to half the rate"),
    ):
        found = paired(results, arm, control, PRIMARY)
        low, high = found.low, found.high
        assert f"{words} {found.mean:+.2f} (" in said
        assert f"({'95 % interval ' if control == 'grpo' else ''}{low:+.2f} to {high:+.2f})" in said
    assert "*refuted*" in said and "Refuted:" in verdict(results)
    probe = paired(results, "llds_0.5", "grpo", "probe_fall")
    assert "With LLDS the likelihood of right answers fell less" in said and probe.high < 0


def test_the_page_says_how_long_the_claim_s_cells_took():
    arms = (read_all(RESULTS)[name] for name in ("grpo", "llds_0.5", "half_grpo"))
    seconds = [cell.header["seconds"] for of_arm in arms for cell in of_arm.values()]
    assert f"{min(seconds):.0f} to {max(seconds):,.0f} s each" in said_by("docs/study.md")
    assert len(seconds) == 30 and "thirty cells ran at the same time" in said_by("docs/study.md")


def test_what_the_pages_advise_is_what_the_cells_show():
    """Words without a number: a cell that comes in later and speaks against them fails here."""
    results = read_all(RESULTS)
    whole = complete(results)
    rate_first = paired(results, "llds_0.5", "half_grpo", PRIMARY)
    gains = [paired(results, name, "grpo", PRIMARY) for name in ("llds_0.2", "llds_0.5") if name in whole]
    held = [paired(results, c.arm, "grpo", "probe_fall") for c in gains]
    for page, words in (
        (
            "docs/study.md",
            "plain GRPO at half the rate had a higher exact match than LLDS-A at the full rate",
        ),
        ("docs/algorithms.md", "in the planned study that did more than LLDS"),
        ("README.md", "So lower the learning rate first"),
    ):
        assert words in said_by(page) and rate_first.high < 0
    for page, words in (
        ("docs/study.md", "That it raises exact match at the full rate was not shown"),
        ("docs/algorithms.md", "a gain of exact match by LLDS was not shown"),
    ):
        assert words in said_by(page) and gains and all(c.low <= 0 for c in gains)
    for page in ("docs/study.md", "docs/algorithms.md"):
        assert "the likelihood of right answers fell less with it" in said_by(page)
    assert all(c.high < 0 for c in held)
    beside = paired(results, "half_llds_0.5", "half_grpo", PRIMARY)
    for page, words in (
        ("docs/study.md", "Beside half the rate LLDS-A with lambda 0.5 raised exact match"),
        ("docs/algorithms.md", "at half the rate, where plain GRPO did not fall, 0.5 raised exact match"),
        (
            "README.md",
            "Beside half the rate LLDS with lambda 0.5 raised exact match by "
            f"{beside.mean:+.2f} ({beside.low:+.2f} to {beside.high:+.2f}), in all ten pairs",
        ),
    ):
        assert words in said_by(page) and beside.low > 0
    if mixed(results, ("half_llds_0.5", "half_grpo")):
        for page in ("README.md", "docs/study.md", "docs/algorithms.md"):
            assert "on different days and perhaps on different kinds of machine" in said_by(page)
    with_llds, without = (results[name] for name in ("half_llds_0.5", "half_grpo"))
    assert all(with_llds[s].outcomes().em > without[s].outcomes().em for s in SEEDS)
    assert paired(results, "half_llds_0.5", "half_grpo", "probe_fall").high < 0
    assert not any(cell.outcomes().collapsed for cell in without.values())
    best = max(whole, key=lambda name: statistics.fmean(c.outcomes().em for c in results[name].values()))
    assert "the highest of the five arms that have run" in said_by("README.md")
    assert (best, len(whole)) == ("half_llds_0.5", 5)
    for page, words in (
        ("docs/study.md", "Its default, 0.2, was not run beside half the rate"),
        ("docs/algorithms.md", "0.2, the default, was not run there"),
        ("README.md", "lambda 0.2, the default, was run at the full rate alone, where no effect was shown"),
    ):
        assert words in said_by(page) and "half_llds_0.2" not in whole


def said_by(page):
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())
