"""The correction of the gap between the sampler's log-probs and the learner's (truncated importance
sampling)."""

from __future__ import annotations

from typing import get_args

import torch

from trainer.algorithm_names import ImportanceMode
from trainer.algorithms.shapes import ActionIds, PerToken
from trainer.algorithms.terms import check_shapes, select


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
        kept = (ratio >= 1 / cap) & (ratio <= cap)
        return torch.where(mask & ~kept, 0.0, torch.ones_like(difference))
