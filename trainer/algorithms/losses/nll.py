"""Negative log-likelihood: the loss of supervised steps, and the control without a hinge for LLDS."""

from __future__ import annotations

from typing import get_args

import torch

from trainer.algorithm_names import Denominator
from trainer.algorithms.shapes import ActionIds, PerToken, TokenMask, TrajectoryMask
from trainer.algorithms.terms import LossTerm, check_shapes, select

LOWEST = -1e4
"""Log-probs below this count as this, without gradient: a token of probability 0 gives no infinite loss."""


def nll_loss(
    logp: PerToken,
    action_ids: ActionIds,
    *,
    preserved: TrajectoryMask | None = None,
    denominator: Denominator = "preserved",
    answer_mask: TokenMask | None = None,
    answer_weight: float = 1.0,
) -> LossTerm:
    """`sum(-logp w)` over the action tokens of the preserved trajectories (all of them without `preserved`).

    logp [B, T] in nats, action_ids int64 [B, T], -1 outside the mask; preserved, denominator and the answer
    span as in `llds_loss`, whose gradient this has on *every* preserved token: -w, whether it lost likelihood
    or not. stats as there.
    """
    if denominator not in get_args(Denominator):
        raise ValueError(f"unknown denominator {denominator!r}; known: {', '.join(get_args(Denominator))}")
    check_shapes(action_ids, logp, answer_mask, rows=(preserved,))
    mask = action_ids >= 0
    held = mask if preserved is None else mask & preserved[:, None]
    term = -select(held, logp).clamp(min=LOWEST)
    if answer_weight != 1.0 and answer_mask is not None:
        term = torch.where(answer_mask, term * answer_weight, term)
    term = select(held, term)
    tokens, preserved_tokens = mask.sum(), held.sum()
    actions = torch.zeros_like(action_ids).scatter_add(1, action_ids.clamp(min=0), held.long())
    stats = {
        "active_tokens": preserved_tokens,
        "active_actions": (actions > 0).sum(),
        "preserved_tokens": preserved_tokens,
        "preserved_actions": (actions > 0).sum(),
        "action_tokens": tokens,
    }
    return LossTerm(term.sum(), preserved_tokens if denominator == "preserved" else tokens, stats)
