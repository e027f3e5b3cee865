"""Policy-gradient losses over action tokens."""

from __future__ import annotations

from typing import get_args

import torch

from trainer.algorithm_names import PolicyLossKind
from trainer.algorithms.shapes import ActionIds, PerToken, PerTrajectory, TokenMask
from trainer.algorithms.terms import LossTerm, check_shapes, select


def policy_loss(
    kind: PolicyLossKind,
    logp: PerToken,
    logp_old: PerToken,
    advantages: PerTrajectory,
    action_ids: ActionIds,
    *,
    clip_low: float,
    clip_high: float,
    max_response_tokens: int | None = None,
    importance_weights: PerToken | None = None,
    chosen: TokenMask | None = None,
    cov_kl: float = 1.0,
) -> LossTerm:
    """The policy term, to be minimised: minus the objective of `kind`. docs/algorithms.md has the formulas
    and sources under "Policy losses".

    logp, logp_old, importance_weights [B, T] (nats; the weights multiply each token's loss and change no
    count), advantages [B], action_ids int64 [B, T], -1 outside the mask. logp_old, advantages and weights get
    no gradient. Values outside the mask may be anything. max_response_tokens: the fixed length of `dr_grpo`.
    chosen bool [B, T]: the tokens of `chosen_tokens`, which `clip_cov` takes out and `kl_cov` penalises with
    the weight cov_kl; None: no token.

    The count depends on the mask and the advantages alone: the learner needs it before the first forward
    pass, and gets it by a call with all log-probs 0 (`Objective.counts`). A count that depended on log-probs
    would be wrong there, without an error.

    stats: POLICY_STATS, and `clip_fraction`. `clipped_tokens` are the action tokens whose clip holds: no
    gradient, in `cispo` a bounded one. `ratio_max` is 0 on an empty mask. Raises ValueError for an unknown
    kind, for shapes that do not fit, and for `dr_grpo` without max_response_tokens.
    """
    if kind not in get_args(PolicyLossKind):
        raise ValueError(f"unknown policy loss {kind!r}; known: {', '.join(get_args(PolicyLossKind))}")
    check_shapes(action_ids, logp, logp_old, importance_weights, chosen, rows=(advantages,))
    mask = action_ids >= 0
    tokens, lengths = mask.sum(), mask.sum(1)
    logp, logp_old = select(mask, logp), select(mask, logp_old.detach())
    advantage = advantages.detach().to(logp.dtype)[:, None]
    low, high = 1 - clip_low, 1 + clip_high

    # Outside the mask both log-probs are 0 now: the ratio is 1 there, and its gradient is cut by `select`.
    if kind == "gspo":
        # The value is the sequence's ratio; the gradient is that of the token's own log-prob.
        mean = (logp.detach() - logp_old).sum(1) / lengths.clamp(min=1)
        # The second factor is 1.
        ratio = mean.exp()[:, None] * (logp - logp.detach()).exp()
    else:
        log_ratio = logp - logp_old
        if kind in ("clip_cov", "kl_cov"):  # two log-probs of minus infinity: unmoved
            log_ratio = torch.where(log_ratio.isnan(), 0.0, log_ratio)
        # exp(20) is 5e8, far beyond any clip. Without a bound the ratio becomes infinite, and infinity times
        # an advantage of 0 is NaN.
        log_ratio = log_ratio.clamp(-20, 20)
        ratio = log_ratio.exp()
    clipped = ratio.clamp(low, high)
    if kind == "cispo":
        # The clipped ratio is a weight without gradient, so that no token loses its gradient, as it would
        # under PPO's clip.
        objective = clipped.detach() * advantage * logp
        bound = (ratio < low) | (ratio > high)
    else:
        # The lower of both: a clip never makes an update look better than it is. It holds above `high` where
        # the advantage is positive, below `low` where it is negative.
        objective = torch.minimum(ratio * advantage, clipped * advantage)
        bound = ((ratio > high) & (advantage > 0)) | ((ratio < low) & (advantage < 0))
    if kind == "clip_cov" and chosen is not None:
        objective = torch.where(chosen, 0.0, objective)
        bound = bound | chosen
    if kind == "kl_cov":
        objective = ratio * advantage
        bound = torch.zeros_like(mask)
        if chosen is not None:
            objective = torch.where(chosen, objective - cov_kl * log_ratio.abs(), objective)
    if importance_weights is not None:
        objective = objective * importance_weights.detach()
    objective = select(mask, objective)

    trajectories = (lengths > 0).sum()
    if kind in ("grpo_seq", "gspo"):
        total, count = (objective.sum(1) / lengths.clamp(min=1)).sum(), trajectories
    elif kind == "dr_grpo":
        if max_response_tokens is None:
            raise ValueError("dr_grpo needs max_response_tokens, the fixed length that divides its sum")
        total, count = objective.sum(), trajectories * max_response_tokens
    else:
        total, count = objective.sum(), tokens
    # `bound` marks tokens whose clip holds: outside the interval on the side to which the advantage pushes.
    clipped_tokens = (bound & mask).sum()
    largest = torch.cat([select(mask, ratio.detach()).flatten(), ratio.new_zeros(1)]).max()
    stats = {
        "clip_fraction": clipped_tokens.double() / tokens.clamp(min=1),
        "clipped_tokens": clipped_tokens,
        "action_tokens": tokens,
        "ratio_max": largest,
    }
    if importance_weights is not None:
        stats["zero_weight_tokens"] = ((importance_weights == 0) & mask).sum()
    return LossTerm(-total, count, stats)
