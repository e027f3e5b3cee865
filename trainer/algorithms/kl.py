"""KL to a reference model as a loss, and the entropy bonus."""

from __future__ import annotations

import torch

from trainer.algorithms.shapes import ActionIds, PerToken
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
    return LossTerm((torch.expm1(d) - d).sum(), mask.sum())


def entropy_bonus(entropy: PerToken, action_ids: ActionIds) -> LossTerm:
    """Minus the summed entropy of the action positions: minimising it raises the entropy.

    entropy [B, T] in nats, as `token_logprobs` gives it; action_ids int64 [B, T]; count: action tokens."""
    check_shapes(action_ids, entropy)
    mask = action_ids >= 0
    return LossTerm(-select(mask, entropy).sum(), mask.sum())
