"""A policy loss of the user's own: a function of tensors, which gives each token its loss."""

from __future__ import annotations

from typing import Protocol

import torch

from trainer.algorithms.shapes import ActionIds, PerToken, PerTrajectory
from trainer.algorithms.terms import LossTerm, check_shapes, select


class TokenLoss(Protocol):
    """What `algorithm.loss: package.module:function` names."""

    def __call__(
        self, logp: PerToken, logp_old: PerToken, advantages: PerToken, *, clip_low: float, clip_high: float
    ) -> PerToken:
        """The loss of each token, [B, T], to be minimised. All arguments are [B, T] too, at least fp32, and 0
        outside the action mask; only `logp` carries a gradient. What the result holds outside the mask does
        not count."""


def users_policy_loss(
    function: TokenLoss,
    logp: PerToken,
    logp_old: PerToken,
    advantages: PerTrajectory,
    action_ids: ActionIds,
    *,
    clip_low: float,
    clip_high: float,
    importance_weights: PerToken | None = None,
) -> LossTerm:
    """The policy term of such a function: its sum over action tokens, divided by their number.

    Arguments are those of `policy_loss`. The stats say for which tokens the ratio lies outside the clip
    bounds, though the function may not clip. Raises ValueError where the function returns another shape, or
    nothing that can be trained on.
    """
    check_shapes(action_ids, logp, logp_old, importance_weights, rows=(advantages,))
    mask = action_ids >= 0
    logp, logp_old = select(mask, logp), select(mask, logp_old.detach())
    advantage = select(mask, advantages.detach().to(logp.dtype)[:, None].expand_as(logp))
    losses = function(logp, logp_old, advantage, clip_low=clip_low, clip_high=clip_high)
    if not isinstance(losses, torch.Tensor) or losses.shape != logp.shape:
        found = tuple(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
        raise ValueError(f"returned {found}; expected the loss of each token, {tuple(logp.shape)}")
    if logp.requires_grad and torch.is_grad_enabled() and not losses.requires_grad:
        raise ValueError("returned a loss without a gradient; expected one that is made of `logp` by torch")
    if importance_weights is not None:
        losses = losses * importance_weights.detach()
    tokens = mask.sum()
    ratio = (logp.detach() - logp_old).clamp(-20, 20).exp()
    clipped = ((ratio < 1 - clip_low) | (ratio > 1 + clip_high)) & mask
    largest = torch.cat([select(mask, ratio).flatten(), ratio.new_zeros(1)]).max()
    stats = {
        "clip_fraction": clipped.sum().double() / tokens.clamp(min=1),
        "clipped_tokens": clipped.sum(),
        "action_tokens": tokens,
        "ratio_max": largest,
    }
    if importance_weights is not None:
        stats["zero_weight_tokens"] = ((importance_weights == 0) & mask).sum()
    return LossTerm(select(mask, losses).sum(), tokens, stats)
