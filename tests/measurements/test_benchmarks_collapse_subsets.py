"""The page of the collapse study while its arms come in: with any arms there, each sentence speaks of arms
that are complete, and its words are those of its numbers. All cells are made up, from seeds."""

from __future__ import annotations

import random
import re

import pytest
from page_parts import section

from benchmarks.collapse.judged import statistics
from benchmarks.collapse.judged.collected import Result
from benchmarks.collapse.judged.findings import _GATES, _LAMBDAS, _QUESTIONS, in_short, lacking
from benchmarks.collapse.judged.outcomes import planned
from benchmarks.collapse.judged.page import block
from benchmarks.collapse.judged.tables import everything
from benchmarks.collapse.planned.arms import ARMS, CLAIM, FAMILIES, RUNNABLE, SEEDS, contrasts

CLAIMED = ("grpo", "llds_0.5", "half_grpo")
FIRST, SECOND = FAMILIES[1], FAMILIES[2]
STATES = {
    "nothing": (),
    "an arm without its control": ("half_llds_0.5", "gspo_llds_0.5"),
    "the claim": CLAIMED,
    "the factorial": FIRST[:6],
    **{f"the first {count}": FIRST[:count] for count in (9, 12, 15, 18)},
    "the claim and the second family": (*CLAIMED, *SECOND),
    "the second family alone": SECOND,
    "all": RUNNABLE,
}
SPAN = re.compile(r"([+-]\d\.\d{3}) \(([+-]\d\.\d{3}) to ([+-]\d\.\d{3})\)")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(statistics, "RESAMPLES", 99)


def cell(arm, seed, effect):
    draw = random.Random(f"{arm}-{seed}")
    em = min(max(0.4 + effect + draw.gauss(0, 0.1), 0.0), 1.0)
    falls = draw.randrange(20, 140)
    rows = [
        {
            "step": step,
            "reward/mean": 0.5 if step == 1 or step < falls else 0.1,
            "grad_norm/max": 1.0 + (step == falls) * draw.random() * 30,
            "probe/fixed": -0.1 - (step > falls) * draw.random() * effect,
            "entropy": 0.2 + (step > falls) * draw.random(),
            "displacement/share_negative": 0.4 + 0.2 * draw.random(),
            "rollout/searches": 1.5,
            "rollout/length": 20.0,
        }
        for step in range(1, 151)
    ]
    header = {
        "arm": arm,
        "seed": seed,
        "died": False,
        "warm_start": f"w{seed}",
        "fingerprint": f"{arm}{seed}",
    }
    scores = dict.fromkeys(planned(), em)
    return Result(header | {"versions": {"machine": "x86_64", "processor": "one"}}, rows, scores, scores)


def results_of(arms, draw):
    effects = {arm: draw.choice((-0.25, 0.0, 0.25)) for arm in ARMS}
    return {arm: {seed: cell(arm, seed, effects[arm]) for seed in SEEDS} for arm in arms}


@pytest.mark.parametrize("state", STATES)
def test_each_sentence_speaks_of_arms_that_are_complete(state):
    check(results_of(STATES[state], random.Random(state)))


@pytest.mark.parametrize("draw", range(4))
def test_the_words_of_a_user_s_lines_are_those_of_their_numbers(draw):
    check(results_of(FIRST[:6], random.Random(draw)))


def test_an_arm_that_lacks_seeds_is_shown_and_in_no_sentence():
    results = results_of(FIRST[:6], random.Random(3))
    results["llds_r"] = {seed: cell("llds_r", seed, 0.1) for seed in SEEDS[:7]}
    del results["llds_0.2"][104]
    check(results)
    text = block(results)
    assert "`llds_0.2` has 9 (it is shown, and not tested). `llds_r` has 7 (it is shown" in text
    assert "| llds_r | LLDS-R .5: the gate is the response | 7 |" in text


def check(results):
    text = block(results)
    assert not re.search(r"\b(nan|inf|None(?! yet))\b", text + in_short(results) + everything(results))
    whole = tuple(arm for arm in ARMS if len(results.get(arm, ())) == len(SEEDS))
    for family, name in ((1, "PLAN.md"), (2, "PLAN_SECOND.md")):
        pairs = contrasts(whole, family)
        part = section(text, f"Contrasts of {name}")
        rows = re.findall(r"^\| (\S+) \| (\S+) \| 10 \|.*\| (\S+) \| (\S+) \|$", part, re.M)
        assert [row[:2] for row in rows] == pairs
        assert all(float(holm) >= float(p) for _, _, p, holm in rows)
        assert (f"Holm's procedure over {len(pairs)} contrasts" in part) == bool(pairs)
        assert ("None yet" in part) == (not pairs)
    shown = [row[1] for row in re.finditer(r"^\| (\S+) \| [^|]+ \| \d+ \| \d+ \|", text, re.M)]
    assert shown == [arm for arm in ARMS if results.get(arm)]
    told = text.split("Missing: ")[1].split(". ")[0] if "Missing: " in text else ""
    assert re.findall(r"`(\S+)`", told) == [arm for arm in ARMS if not results.get(arm)]
    check_outcome(section(text, "The plan's outcome"), whole)
    for line, question in zip(section(text, "For a user").splitlines()[2:], _QUESTIONS, strict=True):
        check_answer(line, question, lacking(results, question[1:3]))
    *_, by_lambda, by_gate = section(text, "The paper and these runs").splitlines()
    for row, arms in ((by_lambda, _LAMBDAS), (by_gate, _GATES)):
        missing = lacking(results, arms)
        if missing:
            assert f"not run yet: {', '.join(missing)} | - |" in row
        else:
            lows = [float(low) for _, low, _ in SPAN.findall(row)]
            assert row.endswith("| fits |") == (min(lows) > 0) and len(lows) == 2
    for table in re.findall(r"(?:^\|.*\n)+", text + "\n", re.M):
        assert len({re.sub(r"`[^`]*`", "", line).count("|") for line in table.splitlines()}) == 1


def check_outcome(said, whole):
    undecided = not {arm for pair in CLAIM for arm in pair} <= set(whole)
    assert said.startswith("Undecided") == undecided
    if not undecided:
        lows = [float(low) for low in re.findall(r"interval ([+-]\d\.\d{3}) to", said)]
        assert ("Not refuted." in said) == (min(lows) > 0) and len(lows) == 2
        for (arm, control), low in zip(CLAIM, lows, strict=True):
            assert (f"{arm} minus {control}" in said.partition("Refuted:")[2]) == (low <= 0)


def check_answer(line, question, missing):
    _, arm, control, _, raised, lowered, not_shown = question
    if missing:
        assert f"Not known yet: {', '.join(missing)} " in line and not SPAN.search(line)
        return
    assert f"`{arm}` minus `{control}`" in line
    _, low, high = (float(part) for part in SPAN.search(line).groups())
    words = raised if low > 0 else lowered if high < 0 else not_shown
    assert words in line and sum(other in line for other in (raised, lowered, not_shown)) == 1
