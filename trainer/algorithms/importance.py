"""The correction of the gap between the sampler's log-probs and the learner's (truncated importance
sampling)."""

from __future__ import annotations

from typing import TypeAlias, get_args

import torch

from trainer.algorithm_names import ImportanceMode
from trainer.algorithms.shapes import ActionIds, PerToken, TokenMask
from trainer.algorithms.terms import check_shapes, select

Band: TypeAlias = tuple[float, float]
"""Lowest and highest ratio that is kept, both included."""


def importance_weights(
    logp_old: PerToken,
    logp_sampler: PerToken,
    action_ids: ActionIds,
    *,
    mode: ImportanceMode = "token",
    cap: float = 2.0,
) -> PerToken:
    """Weights [B, T] for `policy_loss`, without gradient, 1 outside the mask.

    logp_old, logp_sampler [B, T] in nats: the learner's before its first step, and those of the engine that
    sampled. `token`: `min(exp(logp_old - logp_sampler), cap)`. `sequence_mask`: 0 for each token of a
    trajectory whose geometric-mean ratio lies outside [1/cap, cap], otherwise 1. `off`: 1.
    """
    if mode not in get_args(ImportanceMode):
        raise ValueError(f"unknown importance mode {mode!r}; known: {', '.join(get_args(ImportanceMode))}")
    if not cap > 1:
        raise ValueError(f"cap must be > 1, not {cap}")
    check_shapes(action_ids, logp_old, logp_sampler)
    mask = action_ids >= 0
    with torch.no_grad():
        difference = select(mask, logp_old) - select(mask, logp_sampler)
        if mode == "token":
            return difference.exp().clamp(max=cap)
        if mode == "off":
            return torch.ones_like(difference)
        ratio = (difference.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).exp()
        # Asked this way round, NaN is not kept.
        kept = (ratio >= 1 / cap) & (ratio <= cap)
        return torch.where(mask & ~kept, 0.0, torch.ones_like(difference))


def mismatch_masks(
    logp_old: PerToken,
    logp_sampler: PerToken,
    action_ids: ActionIds,
    *,
    geometric_band: Band | None = None,
    token_band: Band | None = None,
    outlier_band: Band | None = None,
) -> PerToken:
    """Weights [B, T] of 0 or 1 for `policy_loss`, without gradient, 1 outside the mask: the product of the
    masks that are given.

    With `ratio = exp(logp_old - logp_sampler)` of each action token: `geometric_band` drops a trajectory
    whose geometric-mean ratio lies outside, `token_band` each token whose ratio does (IcePop), `outlier_band`
    a trajectory with any token whose ratio does. A ratio that is not a number lies outside every band.
    """
    check_shapes(action_ids, logp_old, logp_sampler)
    for band in (geometric_band, token_band, outlier_band):
        if band is not None and not 0 < band[0] < 1 < band[1]:
            raise ValueError(f"a band must lie around 1, above 0, not {band}")
    mask = action_ids >= 0
    with torch.no_grad():
        difference = select(mask, logp_old) - select(mask, logp_sampler)
        kept = torch.ones_like(mask)
        if token_band is not None:
            kept = kept & _inside(difference, token_band)
        if outlier_band is not None:
            kept = kept & (_inside(difference, outlier_band) | ~mask).all(1, keepdim=True)
        if geometric_band is not None:
            mean = difference.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
            kept = kept & _inside(mean, geometric_band)
        return torch.where(mask & ~kept, 0.0, torch.ones_like(difference))


def _inside(log_ratio: PerToken, band: Band) -> TokenMask:
    # Asked this way round, NaN lies outside.
    ratio = log_ratio.exp()
    return (ratio >= band[0]) & (ratio <= band[1])
