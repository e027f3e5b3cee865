"""Weight of answer tokens in LLDS-MA: low while the policy hardly searches, so that it is not held to
answering at once."""

from __future__ import annotations

from typing import get_args

from trainer.algorithm_names import AnswerSchedule


def answer_beta(
    schedule: AnswerSchedule,
    mean_valid_searches: float,
    *,
    llds_lambda: float = 0.2,
    answer_lambda: float = 0.1,
) -> float:
    """beta in 0..1, the `answer_weight` of `llds_loss`, from V = valid searches per trajectory, mean over the
    step.

    `paper` (arXiv 2512.04220): `min(V / 2, 1)`. `code` (its authors' release): `min(answer_lambda * max(V -
    1, 0), lambda) / lambda`: 0 up to one search, then rising, 1 with lambda = 0 (LLDS is off). `off`: 1.
    """
    if schedule not in get_args(AnswerSchedule):
        raise ValueError(f"unknown answer weight {schedule!r}; known: {', '.join(get_args(AnswerSchedule))}")
    v = mean_valid_searches
    if not 0 <= v < float("inf"):
        raise ValueError(f"mean_valid_searches must be finite and >= 0, not {v}")
    if schedule == "off" or (schedule == "code" and llds_lambda == 0):
        return 1.0
    if schedule == "paper":
        return min(v / 2, 1.0)
    return min(answer_lambda * max(v - 1, 0.0), llds_lambda) / llds_lambda
