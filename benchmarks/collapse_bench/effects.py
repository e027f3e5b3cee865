"""Effects of cures on the primary outcome, paired by seed: means, Student's intervals, and their table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.collapse_bench.causes import BENCH
from benchmarks.collapse_bench.collected import Result
from benchmarks.collapse_bench.plan import CURES, EVAL_EVERY, STEPS

PLAIN = "grpo"
Scores = Mapping[tuple[str, str, int], float]


@dataclass(frozen=True)
class Effect:
    """Mean of paired differences with Student's 95 % interval; NaN with fewer than two pairs."""

    pairs: int
    mean: float
    low: float
    high: float

    @property
    def word(self) -> str:
        return "helps" if self.low > 0 else "harms" if self.high < 0 else ""

    def __str__(self) -> str:
        if not self.pairs:
            return "-"
        span = "" if math.isnan(self.low) else f" ({self.low:+.2f} to {self.high:+.2f})"
        text = f"{self.mean:+.2f}{span}"
        return f"**{text}**" if self.word else text


def student(differences: Sequence[float]) -> Effect:
    from scipy.stats import t

    n = len(differences)
    mean = statistics.fmean(differences) if n else math.nan
    if n < 2:
        return Effect(n, mean, math.nan, math.nan)
    half = float(t.ppf(0.975, n - 1)) * statistics.stdev(differences) / math.sqrt(n)
    return Effect(n, mean, mean - half, mean + half)


def scores_of(results: Sequence[Result]) -> dict[tuple[str, str, int], float]:
    """The primary outcome of each cell: mean sampled exact match of the last two evaluations."""
    found = {}
    for result in results:
        sampled = result.scores.get("sampled", {})
        last = [sampled.get(step) for step in (STEPS - EVAL_EVERY, STEPS)]
        if all(score is not None for score in last):
            found[result.key] = statistics.fmean(score for score in last if score is not None)
    return found


def effect(scores: Scores, cell: tuple[str, str], control: tuple[str, str]) -> Effect:
    """Of one (cause, cure) minus another, over the seeds that both have."""
    seeds = sorted({seed for *of, seed in scores if tuple(of) == cell})
    pairs = [(scores[(*cell, s)], scores[(*control, s)]) for s in seeds if (*control, s) in scores]
    return student([a - b for a, b in pairs])


def effects_table(scores: Scores, causes: Sequence[str] = BENCH) -> str:
    """A row per cause: the level of plain GRPO, the strength of the cause, the effect of each cure."""
    cures = [cure for cure in CURES if cure != PLAIN]
    names = ["cause", "seeds", "`grpo`: EM", "`grpo` under `none` minus this"]
    lines = [f"| {' | '.join([*names, *(f'`{c}`' for c in cures)])} |", "| --- " * (4 + len(cures)) + "|"]
    for cause in causes:
        plain = [score for (c, cure, _), score in scores.items() if (c, cure) == (cause, PLAIN)]
        level = f"{statistics.fmean(plain):.2f}" if plain else "-"
        strength = str(effect(scores, ("none", PLAIN), (cause, PLAIN))) if cause != "none" else "-"
        row = [f"`{cause}`", str(len(plain)), level, strength]
        row += [str(effect(scores, (cause, cure), (cause, PLAIN))) for cure in cures]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def names(causes: Sequence[str]) -> str:
    return ", ".join(f"`{cause}`" for cause in causes) or "no cause"
