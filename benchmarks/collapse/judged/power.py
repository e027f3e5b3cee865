"""The smallest difference that ten paired seeds detect, by simulation from the spread of docs/study.md."""

from __future__ import annotations

import math
import statistics

import numpy as np

from benchmarks.collapse.judged.statistics import sign_flips

STUDY = {  # seed: (grpo, llds) of docs/study.md's first table, (best, end) of "EM sampled"
    0: ((0.31, 0.02), (0.57, 0.53)),
    1: ((0.21, 0.21), (0.31, 0.15)),
    2: ((0.40, 0.31), (0.56, 0.39)),
}
LEVEL, POWER, SIMULATIONS, SEED = 0.05, 0.8, 4_000, 7


def study_spread() -> tuple[float, float]:
    """Standard deviations of LLDS minus GRPO over the study's three seeds: of the middle between best and
    last sampled EM (which stands in for a mean over steps 60 to 150), and of the last one."""
    middle = [statistics.fmean(llds) - statistics.fmean(grpo) for grpo, llds in STUDY.values()]
    last = [llds[1] - grpo[1] for grpo, llds in STUDY.values()]
    return statistics.stdev(middle), statistics.stdev(last)


def power(effect: float, n: int = 10, level: float = LEVEL, simulations: int = SIMULATIONS) -> float:
    """Share of simulated studies (n normal differences, standard deviation 1, mean `effect`) whose exact
    two-sided permutation p is at most `level`."""
    drawn = np.random.default_rng(SEED).normal(size=(simulations, n)) + effect
    sums = np.abs(drawn @ sign_flips(n).T)
    observed = np.abs(drawn.sum(axis=1, keepdims=True))
    p = (sums >= observed - 1e-9).mean(axis=1)
    return float((p <= level).mean())


def detectable(n: int = 10, level: float = LEVEL) -> float:
    """Smallest effect, in standard deviations of a paired difference, with power .8; to .01."""
    low, high = 0.0, 8.0
    while high - low > 0.005:
        middle = (low + high) / 2
        low, high = (low, middle) if power(middle, n, level) >= POWER else (middle, high)
    return math.ceil(100 * low) / 100


def paragraph(contrasts: int) -> str:
    """What PLAN.md says. contrasts: tests in Holm's family."""
    middle, last = study_spread()
    alone, first = detectable(), detectable(level=LEVEL / contrasts)
    words = (
        "Over the three seeds of docs/study.md the paired difference (LLDS minus GRPO) of sampled EM",
        f"has a standard deviation of {middle:.2f} (the middle of best and end, which stands in for",
        f"the mean over steps 60 to 150) to {last:.2f} (the end alone). With ten pairs the exact",
        f"two-sided permutation test at .05 has power .8 for a mean difference of {alone:.2f} standard",
        f"deviations: {alone * middle:.2f} to {alone * last:.2f} of exact match. At the strictest",
        f"level of Holm's procedure over {contrasts} contrasts (p of at most .05 / {contrasts}, while",
        f"the smallest p of ten pairs is 2 / 1,024) it takes {first:.2f} standard deviations:",
        f"{first * middle:.2f} to {first * last:.2f}. ({SIMULATIONS:,} simulated studies with normal",
        "differences. Three seeds leave the standard deviation itself uncertain by a factor of .5 to",
        "6, and a window mean of four evaluations of 500 questions should spread less than an end",
        f"value.) Differences below {alone * middle:.1f} are likely to be missed; an interval that",
        "covers 0 is then no proof of equality.",
    )
    return " ".join(words)
