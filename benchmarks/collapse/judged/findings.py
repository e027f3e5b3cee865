"""What the runs say of the paper's claims, and what follows for a user: rows and sentences by rule, from
collected results alone."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.collapse.judged.collected import Result, Results
from benchmarks.collapse.judged.outcomes import PRIMARY, REWARD_WIDTH
from benchmarks.collapse.judged.sameness import faults, mixed
from benchmarks.collapse.judged.tables import Contrast, complete, p_text, paired, tested, verdict
from benchmarks.collapse.planned.arms import ARMS, CLAIM, SEEDS, STEPS

PROBE_DROP = 0.15
"""Nats per token below its best from which the fixed probe has fallen; the monitor's threshold."""
FELL_SHARE, FELL_STEPS = 0.85, 3
"""The reward has fallen where its mean of 8 steps is under this share of its best, so many steps running."""
FIRST_STEPS = 30
"""Steps that give the usual gradient norm."""
EXPLODES = 10.0
"""Times the usual norm (a median of steps' largest norms) that count as an explosion."""
SPIKE = 2.0
"""Times the lowest earlier mean of 8 steps that count as a spike of entropy."""


@dataclass(frozen=True)
class Signs:
    """Steps (from 1) at which one run first shows each sign; None: never."""

    probe: int | None
    reward: int | None
    gradient: int | None
    entropy: int | None
    mostly_falling: bool
    """Whether more than half of the preserved responses fell, in the mean over steps 60 to 150."""
    collapsed: bool

    @property
    def in_order(self) -> bool:
        """Three phases: the likelihood falls while the reward has not fallen yet, then the reward falls."""
        return self.reward is not None and self.probe is not None and self.probe < self.reward


def signs(result: Result) -> Signs:
    found = result.outcomes()
    series = {key: _series(result, key) for key in ("probe/fixed", "reward/mean", "grad_norm/max", "entropy")}
    usual = [value for step, value in series["grad_norm/max"] if step <= FIRST_STEPS]
    limit = EXPLODES * statistics.median(usual) if usual else float("inf")
    return Signs(
        probe=_below_best(series["probe/fixed"]),
        reward=_reward_fell(series["reward/mean"]),
        gradient=next((s for s, v in series["grad_norm/max"] if s > FIRST_STEPS and v > limit), None),
        entropy=_spike(series["entropy"]),
        mostly_falling=(found.share_falling or 0.0) > 0.5,
        collapsed=found.collapsed,
    )


def _series(result: Result, key: str) -> list[tuple[int, float]]:
    return [(row["step"], row[key]) for row in result.rows if isinstance(row.get(key), int | float)]


def _below_best(series: Sequence[tuple[int, float]]) -> int | None:
    best = float("-inf")
    for step, value in series:
        best = max(best, value)
        if value < best - PROBE_DROP:
            return step
    return None


def means_of_8(series: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Mean of 8 values, by the step of the last."""
    return [
        (series[i][0], statistics.fmean(value for _, value in series[i - REWARD_WIDTH + 1 : i + 1]))
        for i in range(REWARD_WIDTH - 1, len(series))
    ]


def _reward_fell(series: Sequence[tuple[int, float]]) -> int | None:
    best, low = 0.0, 0
    for step, mean in means_of_8(series):
        best = max(best, mean)
        low = low + 1 if mean < FELL_SHARE * best else 0
        if low == FELL_STEPS:
            return step - FELL_STEPS + 1
    return None


def _spike(series: Sequence[tuple[int, float]]) -> int | None:
    lowest = float("inf")
    for step, mean in means_of_8(series):
        lowest = min(lowest, mean)
        if mean > SPIKE * lowest:
            return step
    return None


def paper_table(results: Results) -> str:
    """A row per claim of the paper: what it says, what was seen here, and whether that fits."""
    lines = ["| the paper says | we saw | does it fit? |", "| --- | --- | --- |"]
    found = [signs(result) for _, result in sorted(results.get("grpo", {}).items())]
    for says, what, holds, shorter in _CLAIMS:
        lines.append(_counted(says, what, [holds(one) for one in found], shorter))
    lines.append(_ordered(results, "more LLDS holds better: lambda 0, then .2, then .5", _LAMBDAS))
    lines.append(_ordered(results, "A is better than R, and R better than no gate (token)", _GATES))
    return "\n".join(lines)


_CLAIMS: tuple[tuple[str, str, Callable[[Signs], bool], bool], ...] = (
    (
        "plain GRPO collapses within 300 steps",
        f"reward stays under half of its best within {STEPS} steps, half as many",
        lambda s: s.collapsed,
        True,
    ),
    (
        "three phases: the likelihood of right answers falls before the reward does",
        f"the fixed probe is {PROBE_DROP} nats below its best before the reward has fallen",
        lambda s: s.in_order,
        False,
    ),
    (
        "more than half of the displacements become negative",
        "more than half of the preserved responses fall, in the mean of steps 60 to 150",
        lambda s: s.mostly_falling,
        False,
    ),
    (
        "entropy spikes before the collapse",
        f"the mean entropy of 8 steps is {SPIKE:g} times its lowest, before the reward has fallen",
        lambda s: s.entropy is not None and s.reward is not None and s.entropy < s.reward,
        False,
    ),
    (
        "the gradient norm explodes",
        f"the largest norm of a step is over {EXPLODES:g} times the median of the first {FIRST_STEPS} steps'",
        lambda s: s.gradient is not None,
        False,
    ),
)
"""The claim, what is counted, its rule, and whether the runs end before the claim's last step: then a run
without the sign does not speak against the claim."""
_LAMBDAS = ("llds_0.5", "llds_0.2", "grpo")
_GATES = ("llds_0.5", "llds_r", "token_gate")
"""Arms from the best to the worst, as the paper has them."""


def _counted(says: str, what: str, hits: Sequence[bool], shorter: bool) -> str:
    if not hits:
        return f"| {says} | not run yet: grpo | - |"
    count = sum(hits)
    if count == len(hits):
        word = "fits"
    elif shorter:
        word = "not shown: the others could still collapse"
    else:
        word = "does not fit" if 2 * count <= len(hits) else "mostly fits"
    return f"| {says} | {what}: {count} of {len(hits)} runs of plain GRPO | {word} |"


def _ordered(results: Results, says: str, arms: Sequence[str]) -> str:
    if missing := lacking(results, arms):
        return f"| {says} | not run yet: {', '.join(missing)} | - |"
    if odd := faults(results, arms):
        return f"| {says} | {'; '.join(odd)} | - |"
    steps = [paired(results, a, b, PRIMARY) for a, b in itertools.pairwise(arms)]
    said = "; ".join(f"{c.arm} - {c.control}: {_span(c)}" for c in steps)
    if all(c.low > 0 for c in steps):
        word = "fits"
    elif any(c.high < 0 for c in steps):
        word = "does not fit"
    else:
        word = "not shown: an interval covers 0"
    return f"| {says} | EM, steps 60 to 150: {said} | {word} |"


def lacking(results: Results, arms: Sequence[str]) -> list[str]:
    """Arms of these that lack seeds of the plan."""
    whole = complete(results)
    return [arm for arm in arms if arm not in whole]


def _span(c: Contrast) -> str:
    return f"{c.mean:+.3f} ({c.low:+.3f} to {c.high:+.3f})"


_RAISED, _LOWERED, _OPEN = "raised", "lowered", "open"


def _way(c: Contrast) -> str:
    return _RAISED if c.low > 0 else _LOWERED if c.high < 0 else _OPEN


def user_lines(results: Results) -> list[str]:
    """Five answers. Each has a sentence for an effect above 0, one below 0, and one that was not shown; an
    answer whose arms are not there says so."""
    lines = [f"- *{asks}* {_answer(results, *rest)}" for asks, *rest in _QUESTIONS]
    return [lines[0] + _likelihood(results, *CLAIM[0]), *lines[1:]]


_QUESTIONS: tuple[tuple[str, str, str, str, str, str, str], ...] = (
    (
        "When should I switch LLDS on?",
        "llds_0.5",
        "grpo",
        PRIMARY,
        "At a rate at which plain GRPO falls: LLDS-A .5 raised exact match",
        "Not for answers: at a rate at which plain GRPO falls, LLDS-A .5 lowered exact match",
        "At a rate at which plain GRPO falls, an effect of LLDS-A .5 on exact match was not shown",
    ),
    (
        "With what lambda?",
        "llds_0.2",
        "grpo",
        PRIMARY,
        "The paper's .2 already raised exact match",
        "Not .2: it lowered exact match",
        "For .2 no effect on exact match was shown",
    ),
    (
        "What else first?",
        "half_grpo",
        "grpo",
        PRIMARY,
        "Halve the learning rate: without LLDS that raised exact match",
        "Not half the learning rate: it lowered exact match",
        "Half the learning rate alone had no effect that was shown",
    ),
    (
        "Is LLDS better than half the rate?",
        "llds_0.5",
        "half_grpo",
        PRIMARY,
        "Yes, at the full rate LLDS-A .5 had the higher exact match",
        "No, half the rate without LLDS had the higher exact match",
        "No difference was shown",
    ),
    (
        "And both together?",
        "half_llds_0.5",
        "half_grpo",
        PRIMARY,
        "At half the rate LLDS-A .5 still raised exact match",
        "At half the rate LLDS-A .5 lowered exact match",
        "At half the rate no effect of LLDS-A .5 was shown",
    ),
)


FIRST_QUESTIONS = 2, 4
"""Places of the questions about half the rate, without LLDS and with it."""


def in_short(results: Results) -> str:
    """The outcome, and what half the rate does, without LLDS and with it: what a reader needs first."""
    asked = (_QUESTIONS[place][1:] for place in FIRST_QUESTIONS)
    answers = [_answer(results, *rest) for rest in asked if not lacking(results, rest[:2])]
    said = " ".join([verdict(results), *answers])
    return f"**The planned study** (laboratory, ten paired seeds per arm): {said}"


def _answer(
    results: Results, arm: str, control: str, outcome: str, raised: str, lowered: str, open_: str
) -> str:
    if missing := lacking(results, (arm, control)):
        return f"Not known yet: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not complete."
    if odd := faults(results, (arm, control)):
        return f"Not known yet: {'; '.join(odd)}."
    c = next(c for c in tested(results, outcome) if (c.arm, c.control) == (arm, control))
    sentence = {_RAISED: raised, _LOWERED: lowered, _OPEN: open_}[_way(c)]
    numbers = f"`{arm}` minus `{control}`: {_span(c)}, {c.pairs} pairs, p {p_text(c.adjusted)} by Holm"
    return f"{sentence} ({numbers}).{mixed(results, (arm, control))}"


def _likelihood(results: Results, arm: str, control: str) -> str:
    """What an arm does to the fixed probe, as a further sentence; empty where that is not known."""
    if lacking(results, (arm, control)) or faults(results, (arm, control)):
        return ""
    c = next(c for c in tested(results, "probe_fall") if (c.arm, c.control) == (arm, control))
    if not c.pairs:
        return ""
    sentence = {
        _RAISED: "The likelihood of earlier right answers fell more with it",
        _LOWERED: "The likelihood of earlier right answers fell less with it",
        _OPEN: "That the likelihood of earlier right answers fell more or less with it was not shown",
    }[_way(c)]
    pairs = f"{c.pairs} pairs, p {p_text(c.adjusted)} by Holm"
    return f" {sentence} (fall of the fixed probe, nats per token: {_span(c)}, {pairs})."


def arms_there(results: Results) -> str:
    """Which arms are complete, which lack seeds, and which are missing."""
    whole = complete(results)
    part = {arm: results[arm] for arm in ARMS if results.get(arm) and arm not in whole}
    absent = [arm for arm in ARMS if not results.get(arm)]
    parts = [f"{len(whole)} of {len(ARMS)} arms have all {len(SEEDS)} seeds."]
    if whole:
        parts.append(f"Complete: {', '.join(f'`{arm}`' for arm in whole)}.")
    for arm, mine in part.items():
        parts.append(f"`{arm}` has {len(mine)} (it is shown, and not tested).")
    if absent:
        parts.append(f"Missing: {', '.join(f'`{arm}`' for arm in absent)}.")
    return " ".join(parts)
