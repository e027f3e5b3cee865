"""Which trajectories are right, wrong, untrained or unknown: the one definition, for metrics, probes, LLDS
and adapters.

*Right* is what the reward function says: the reward that it gave, before any penalty for length, is at least
`right_at` (the setting `reward.right_at`; by default the reward's best value). It is not the sign of the
advantage: the best of several wrong answers has an advantage above 0. LLDS's *preserved* set (advantage >= 0,
arXiv 2512.04220) is another thing, and keeps its own word.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np

Rewards = Sequence[float | None] | np.ndarray
"""Rewards of B trajectories; None and NaN are those that are not known."""
BEST_REWARD = 1.0
"""Best value of the rewards that come with Unspiral, and what is right where nobody says otherwise."""
ROUNDING = 1e-6
"""Ten times .1 is a little less than 1."""


class Verdict(IntEnum):
    """What a step's metrics take a trajectory for."""

    UNKNOWN = 0
    """It has no reward: no loss reads it, and no likelihood metric does."""
    UNTRAINED = 1
    """Its advantage is 0: nothing was to be learnt from its group."""
    RIGHT = 2
    WRONG = 3


def known_rewards(rewards: Rewards) -> np.ndarray:
    """float64 [B]: NaN for None and for what is not finite."""
    values = np.asarray([np.nan if r is None else r for r in rewards], np.float64)
    return np.where(np.isfinite(values), values, np.nan)


def is_right(rewards: Rewards, right_at: float = BEST_REWARD) -> np.ndarray:
    """bool [B]: a reward of at least `right_at`; False where there is none."""
    return known_rewards(rewards) >= right_at - ROUNDING


def verdicts(
    rewards: Rewards, advantages: Sequence[float] | np.ndarray, right: Sequence[bool | None] | None = None
) -> np.ndarray:
    """int [B] of `Verdict`.

    right: [B], what the reward function says; where it says nothing (None), a reward of at least BEST_REWARD.
    A trainer that posts neither shows by the sign of its advantages alone which answers of a group it takes
    for the better ones: above 0 is right.
    """
    values = known_rewards(rewards)
    worth = np.nan_to_num(np.asarray(advantages, np.float64))
    good = np.where(np.isfinite(values), is_right(values), worth > 0)
    if right is not None:
        said = np.asarray([r is not None for r in right], bool)
        good = np.where(said, np.asarray([bool(r) for r in right], bool), good)
    judged = np.where(good, Verdict.RIGHT, Verdict.WRONG)
    judged = np.where(worth == 0, Verdict.UNTRAINED, judged)
    return np.where(np.isfinite(values) | (worth != 0), judged, Verdict.UNKNOWN)


def probe_rows(right: np.ndarray, advantages: np.ndarray) -> np.ndarray:
    """Rows whose likelihood the probes follow: right, and not pushed down by the update. A right answer that
    earned less than the others of its group, for its length or its form, is meant to fall."""
    return np.flatnonzero(right & ~(advantages < 0))
