"""Means with bootstrap intervals, the papers' averages, pass@k, and exact paired tests."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from trainer.suite.sets import GENERAL, MULTI_HOP, SETS, in_order

RESAMPLES = 2000
LEVEL = 0.95
"""Of the intervals."""
AVERAGES: dict[str, tuple[str, ...]] = {"general": GENERAL, "multi_hop": MULTI_HOP, "macro": SETS}
"""The papers' averages: each the mean of its sets' means. A set counts the same however many rows it has."""
MICRO = "micro"
"""The mean over all rows: a large set counts for more."""
_CELLS = 1 << 22
"""Numbers that are drawn at a time."""


def averages_of(by_set: Mapping[str, float]) -> dict[str, float]:
    """General, multi-hop and macro average of one number per set. An average of which a set is missing is
    absent."""
    return {
        name: math.fsum(by_set[one] for one in members) / len(members)
        for name, members in AVERAGES.items()
        if all(one in by_set for one in members)
    }


def pass_at_k(n: int, right: int, k: int) -> float:
    """Probability that k of n samples hold a right one, drawn without replacement: the unbiased estimate of
    arXiv 2107.03374, eq. 1. Raises ValueError for k outside 1..n."""
    if not 1 <= k <= n:
        raise ValueError(f"k={k}: expected 1 to {n}")
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def resampled_means(scores: np.ndarray, resamples: int, rng: np.random.Generator) -> np.ndarray:
    """Means of bootstrap samples of the rows. scores: float [n, m], n >= 1; the result is [resamples, m]. The
    same rows are drawn for all m columns."""
    n = len(scores)
    out = np.empty((resamples, scores.shape[1]))
    step = max(1, _CELLS // n)
    for start in range(0, resamples, step):
        drawn = rng.integers(0, n, (min(step, resamples - start), n))
        for column in range(scores.shape[1]):
            out[start : start + len(drawn), column] = scores[drawn, column].mean(axis=1)
    return out


class Estimates:
    """Means by set and over sets of one or more columns of scores, with percentile bootstrap intervals.

    by_set: float [n, m] of each set. Rows are drawn within their set, as the benchmarks' sizes are fixed. The
    seed is fixed: the same scores have the same intervals.
    """

    def __init__(self, by_set: Mapping[str, np.ndarray], resamples: int = RESAMPLES, seed: int = 0):
        self.by_set = {name: by_set[name] for name in in_order(by_set)}
        self._drawn = {
            name: resampled_means(scores, resamples, np.random.default_rng([seed, _number_of(name)]))
            for name, scores in self.by_set.items()
        }

    def of_set(self, name: str, column: int = 0) -> dict[str, float]:
        """`{"mean", "low", "high"}` of one set."""
        return _estimate(self.by_set[name][:, column].mean(), self._drawn[name][:, column])

    def averages(self, column: int = 0) -> dict[str, dict[str, float]]:
        """The same of general, multi_hop, macro (where no set of theirs is missing) and micro."""
        means = {name: float(scores[:, column].mean()) for name, scores in self.by_set.items()}
        out = {
            name: _estimate(value, np.mean([self._drawn[one][:, column] for one in AVERAGES[name]], axis=0))
            for name, value in averages_of(means).items()
        }
        sizes = {name: len(scores) for name, scores in self.by_set.items()}
        total = sum(sizes.values())
        drawn = sum(self._drawn[name][:, column] * n for name, n in sizes.items()) / total
        value = math.fsum(float(scores[:, column].sum()) for scores in self.by_set.values()) / total
        return out | {MICRO: _estimate(value, np.asarray(drawn))}


def _number_of(name: str) -> int:
    """Seeds the draws of a set: whatever other sets are there, its own have the same intervals."""
    if name in SETS:
        return SETS.index(name)
    return len(SETS) + int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big")


def _estimate(value: float, drawn: np.ndarray) -> dict[str, float]:
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return {"mean": float(value), "low": float(low), "high": float(high)}


def sign_test(differences: Iterable[float]) -> tuple[int, int, float]:
    """Rows above 0, rows below, and the two-sided p of an exact sign test, in which ties do not count. For
    scores of 0 and 1 this is McNemar's exact test."""
    values: Sequence[float] = list(differences)
    wins = sum(value > 0 for value in values)
    losses = sum(value < 0 for value in values)
    n = wins + losses
    term = 1  # C(n, k), in whole numbers: exact for any n
    tail = 0
    for k in range(min(wins, losses) + 1):
        tail += term
        term = term * (n - k) // (k + 1)
    return wins, losses, min(1.0, 2 * tail / 2**n) if n < 1000 else min(1.0, _ratio(2 * tail, n))


def _ratio(numerator: int, power: int) -> float:
    """numerator / 2 ** power, also where both are too large for a float."""
    shift = max(0, numerator.bit_length() - 64)
    return math.ldexp(numerator >> shift, shift - power)
