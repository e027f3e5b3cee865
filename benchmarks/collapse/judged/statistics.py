"""Paired statistics of the study, exact or seeded: the same numbers at every call."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import numpy as np

RESAMPLES = 9_999
BOOTSTRAP_SEED = 20_261
Key = TypeVar("Key", bound=Hashable)
LARGEST_EXACT = 20
"""Most pairs that are enumerated: 2^20 sign flips."""


def sign_flips(n: int) -> np.ndarray:
    """All 2^n vectors of signs, [2^n, n]."""
    if n > LARGEST_EXACT:
        raise ValueError(f"{n} pairs are too many to enumerate; at most {LARGEST_EXACT}")
    return np.array(list(itertools.product((1.0, -1.0), repeat=n))).reshape(2**n, n)


def permutation_p(differences: Sequence[float]) -> float:
    """Two-sided p of the paired permutation test of the mean: the share of all 2^n sign flips whose |sum| is
    at least the observed one. NaN without pairs. Equal sums that differ by rounding count as equal."""
    d = np.asarray(differences, float)
    if not len(d):
        return math.nan
    sums = np.abs(sign_flips(len(d)) @ d)
    observed = abs(d.sum())
    return float(np.mean(sums >= observed - 1e-9 * max(1.0, observed)))


def interval(differences: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """BCa bootstrap interval of the mean (Efron 1987), seeded. All differences equal: that value twice; fewer
    than two: NaN."""
    from scipy.stats import bootstrap

    d = np.asarray(differences, float)
    if len(d) < 2:
        return math.nan, math.nan
    if np.ptp(d) == 0:
        return float(d[0]), float(d[0])
    found = bootstrap(
        (d,),
        np.mean,
        n_resamples=RESAMPLES,
        confidence_level=level,
        method="BCa",
        rng=np.random.default_rng(BOOTSTRAP_SEED),
    ).confidence_interval
    return float(found.low), float(found.high)


def holm(p_values: Mapping[Key, float]) -> dict[Key, float]:
    """Holm's step-down adjustment (1979): p times the number of hypotheses not yet passed, never falling,
    at most 1. NaN stays NaN and is not counted."""
    known = sorted((p, i, key) for i, (key, p) in enumerate(p_values.items()) if not math.isnan(p))
    adjusted: dict[Key, float] = {}
    worst = 0.0
    for rank, (p, _, key) in enumerate(known):
        worst = max(worst, min(1.0, (len(known) - rank) * p))
        adjusted[key] = worst
    return {key: adjusted.get(key, math.nan) for key in p_values}
