"""Policy-gradient losses over action tokens."""

from __future__ import annotations

from typing import get_args

import torch

from trainer.algorithm_names import PolicyLossKind
from trainer.algorithms.shapes import ActionIds, PerToken, PerTrajectory
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
) -> LossTerm:
    """The policy term, to be minimised. With `ratio = exp(clamp(logp - logp_old, -20, 20))`, advantage A, and
    sums over action tokens:

    | kind | arXiv | maximised for each token | loss_sum, count |
    | --- | --- | --- | --- |
    | `grpo` | 2512.04220 eq. 1 | `min(ratio A, clip(ratio) A)` | sum; action tokens |
    | `dapo` | 2503.14476 | as `grpo` | as `grpo` |
    | `grpo_seq` | 2402.03300 | as `grpo` | sum of each trajectory's mean; non-empty trajectories |
    | `dr_grpo` | 2503.20783 | as `grpo` | sum; non-empty trajectories x `max_response_tokens` |
    | `gspo` | 2507.18071 | as `grpo`, with another ratio | as `grpo_seq` |
    | `cispo` | 2506.13585 | `sg[clip(ratio)] A logp` | as `grpo` |

    `clip` is to [1 - clip_low, 1 + clip_high], and `sg` stops the gradient. The ratio of `gspo` is
    `sg[s] exp(logp - sg[logp])` with `s = exp(mean of logp - logp_old)`.

    `dapo` is `grpo` with its own clips (0.2, 0.28); its dynamic sampling is the caller's.

    logp, logp_old, importance_weights [B, T] (nats; the weights multiply each token's loss and change no
    count), advantages [B], action_ids int64 [B, T], -1 outside the mask. logp_old, advantages and weights get
    no gradient. Values outside the mask may be anything. stats: `clip_fraction` (action tokens whose clipped
    bound holds: no gradient, in `cispo` a bounded one), `clipped_tokens`, `action_tokens`, `ratio_max` (0 on
    an empty mask).
    """
    if kind not in get_args(PolicyLossKind):
        raise ValueError(f"unknown policy loss {kind!r}; known: {', '.join(get_args(PolicyLossKind))}")
    check_shapes(action_ids, logp, logp_old, importance_weights, rows=(advantages,))
    mask = action_ids >= 0
    tokens, lengths = mask.sum(), mask.sum(1)
    logp, logp_old = select(mask, logp), select(mask, logp_old.detach())
    advantage = advantages.detach().to(logp.dtype)[:, None]
    low, high = 1 - clip_low, 1 + clip_high

    # Outside the mask both log-probs are 0 now: the ratio is 1 there, and its gradient is cut by `select`.
    if kind == "gspo":
        # The value is the sequence's ratio; the gradient is that of the token's own log-prob.
        mean = (logp.detach() - logp_old).sum(1) / lengths.clamp(min=1)
        ratio = mean.exp()[:, None] * (logp - logp.detach()).exp()
    else:
        ratio = (logp - logp_old).clamp(-20, 20).exp()
    clipped = ratio.clamp(low, high)
    if kind == "cispo":
        objective = clipped.detach() * advantage * logp
        bound = (ratio < low) | (ratio > high)
    else:
        objective = torch.minimum(ratio * advantage, clipped * advantage)
        bound = ((ratio > high) & (advantage > 0)) | ((ratio < low) & (advantage < 0))
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
    return LossTerm(-total, count, stats)
