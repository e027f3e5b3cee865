"""KL to a reference model and to the start of the batch as losses, and the entropy bonus."""

from __future__ import annotations

import torch

from trainer.algorithms.shapes import ActionIds, PerToken, TrajectoryMask
from trainer.algorithms.terms import LossTerm, check_shapes, select


def kl_k3(logp: PerToken, logp_ref: PerToken, action_ids: ActionIds) -> LossTerm:
    """Estimate of KL(policy || reference) from sampled tokens: `k3 = exp(d) - d - 1`, `d = clamp(logp_ref -
    logp, -10, 10)`.

    logp, logp_ref [B, T] in nats, action_ids int64 [B, T]; count: action tokens. k3 (Schulman, "Approximating
    KL divergence", 2020) is never negative. The clamp keeps value and gradient finite however far the two are
    apart; beyond it the gradient is 0. Zero-variance groups feel it too: their policy gradient is 0, their KL
    is not.
    """
    check_shapes(action_ids, logp, logp_ref)
    mask = action_ids >= 0
    d = (select(mask, logp_ref.detach()) - select(mask, logp)).clamp(-10, 10)
    # expm1: near d = 0, where most tokens are, exp(d) - 1 would lose its digits.
    return LossTerm((torch.expm1(d) - d).sum(), mask.sum())


def kl_batch_start(
    logp: PerToken, logp_old: PerToken, action_ids: ActionIds, *, preserved: TrajectoryMask | None = None
) -> LossTerm:
    """Estimate of KL(old || policy) from tokens that the old policy sampled: `exp(d) - d - 1`,
    `d = clamp(logp - logp_old, -10, 10)`.

    logp, logp_old [B, T] in nats, logp_old without gradient; preserved bool [B]: the trajectories that count,
    None: all. count: their action tokens. The gradient is `exp(d) - 1` on each token: it pulls back what fell
    and what rose, in proportion to how far, and is 0 at the start of the batch. A token whose d is not a
    number (two log-probs of minus infinity) counts as unmoved.
    """
    check_shapes(action_ids, logp, logp_old, rows=(preserved,))
    mask = action_ids >= 0
    held = mask if preserved is None else mask & preserved[:, None]
    d = select(held, logp) - select(held, logp_old.detach())
    d = torch.where(d.isnan(), 0.0, d).clamp(-10, 10)
    return LossTerm((torch.expm1(d) - d).sum(), held.sum())


def entropy_bonus(entropy: PerToken, action_ids: ActionIds) -> LossTerm:
    """Minus the summed entropy of the action positions: minimising it raises the entropy.

    entropy [B, T] in nats, as `token_logprobs` gives it; action_ids int64 [B, T]; count: action tokens."""
    check_shapes(action_ids, entropy)
    mask = action_ids >= 0
    return LossTerm(-select(mask, entropy).sum(), mask.sum())
