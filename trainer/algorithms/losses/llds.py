"""LLDS, the lazy-likelihood-displacement regulariser (arXiv 2512.04220, v2): a one-sided pull on preserved
tokens that lost likelihood."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from trainer.algorithm_names import Denominator, Gate
from trainer.algorithms.shapes import ActionIds, PerToken, PerTrajectory, TokenMask, TrajectoryMask
from trainer.algorithms.terms import LossTerm, check_shapes, select

FARTHEST = 1e4
"""Largest drop of a token with the gate `random`, in nats."""


def llds_loss(
    logp: PerToken,
    logp_old: PerToken,
    advantages: PerTrajectory,
    action_ids: ActionIds,
    *,
    gate: Gate = "action",
    denominator: Denominator = "preserved",
    answer_mask: TokenMask | None = None,
    answer_weight: float = 1.0,
    min_drop: float = 0.0,
    preserved: TrajectoryMask | None = None,
    lottery: PerToken | None = None,
) -> LossTerm:
    """`sum(1[sum of drop over the unit > 0] max(0, drop) w)` over the action tokens of preserved
    trajectories, `drop = logp_old - logp`.

    logp, logp_old [B, T] (nats; logp_old is the learner's own, at the anchor, without gradient), advantages
    [B], action_ids int64 [B, T]: index of the token's action in its trajectory (0..T-1), -1 outside the mask.
    preserved bool [B]: the trajectories to hold; None is the paper's choice, advantage >= 0.

    gate: the unit whose summed drop must be above 0: `action` (LLDS-A), `response` (LLDS-R), or none
    (`token`); no gradient goes through it. `random` is a control: in each trajectory as many action tokens
    as `action` would pull, but those with the lowest `lottery` ([B, T]), and without the hinge, whether they
    lost likelihood or not. denominator: the count is the action tokens of the preserved
    trajectories (paper) or all action tokens (released code). answer_weight: w on tokens of answer_mask bool
    [B, T] (LLDS-MA), 1 elsewhere. min_drop: drops with |drop| <= min_drop nats count as 0 before gate and
    sum, because re-scoring noise alone would get the pull's full strength.

    The gradient of loss_sum is -w on each active token, however small the drop, and exactly 0 elsewhere: at
    drop = 0, on other trajectories, outside the mask. stats: `active_tokens`, `active_actions` (with at least
    one active token), `preserved_tokens`, `preserved_actions`, `action_tokens`.
    """
    if gate not in get_args(Gate):
        raise ValueError(f"unknown LLDS gate {gate!r}; known: {', '.join(get_args(Gate))}")
    if denominator not in get_args(Denominator):
        raise ValueError(
            f"unknown LLDS denominator {denominator!r}; known: {', '.join(get_args(Denominator))}"
        )
    if not min_drop >= 0:
        raise ValueError(f"min_drop must be >= 0 nats, not {min_drop}")
    if answer_weight != 1.0 and answer_mask is None:
        raise ValueError("answer_weight needs answer_mask, the tokens it weighs")
    if gate == "random" and lottery is None:
        raise ValueError("the gate random needs a lottery, a number for each token")
    check_shapes(action_ids, logp, logp_old, answer_mask, lottery, rows=(advantages, preserved))
    mask = action_ids >= 0
    held = mask & (advantages >= 0 if preserved is None else preserved)[:, None]
    drop = select(held, logp_old.detach()) - select(held, logp)
    if gate == "random":
        drop = torch.where(drop.isnan(), 0.0, drop).clamp(-FARTHEST, FARTHEST)
    if min_drop:
        drop = torch.where(drop.abs() <= min_drop, 0.0, drop)

    # An index is never negative. What lies outside the mask is added to action 0, as 0.
    unit = action_ids.clamp(min=0)

    def by_action(values: Tensor) -> Tensor:
        # fp64: the sign of a sum must not depend on the order in which it was added up.
        return torch.zeros(action_ids.shape, dtype=torch.float64, device=logp.device).scatter_add(
            1, unit, values.double()
        )

    fallen = by_action(drop.detach()) if gate in ("action", "random") else None
    if fallen is not None:
        opened = held & (fallen.gather(1, unit) > 0)
    elif gate == "response":
        opened = held & (drop.detach().double().sum(1, keepdim=True) > 0)
    else:
        opened = held
    if gate == "random" and lottery is not None:
        opened = _drawn(held, (opened & (drop.detach() > 0)).sum(1), lottery)
        term = select(opened, drop)
    else:
        term = select(opened, torch.relu(drop))  # relu: its gradient at 0 is 0
    if answer_weight != 1.0 and answer_mask is not None:
        term = torch.where(answer_mask, term * answer_weight, term)

    active = opened if gate == "random" else opened & (drop.detach() > 0)
    tokens, preserved_tokens = mask.sum(), held.sum()
    stats = {
        "active_tokens": active.sum(),
        # An action whose summed drop is above 0 has a token that fell: with the action gate no second sum is
        # needed.
        "active_actions": (
            (fallen if gate == "action" and fallen is not None else by_action(active)) > 0
        ).sum(),
        "preserved_tokens": preserved_tokens,
        "preserved_actions": (by_action(held) > 0).sum(),
        "action_tokens": tokens,
    }
    return LossTerm(term.sum(), preserved_tokens if denominator == "preserved" else tokens, stats)


def _drawn(held: TokenMask, count: Tensor, lottery: PerToken) -> TokenMask:
    """Of the held tokens of each row, the `count` ([B]) with the lowest lottery."""
    # The second argsort turns the order of the tokens into the place of each in it.
    order = torch.where(held, lottery.double(), torch.inf).argsort(dim=1, stable=True).argsort(dim=1)
    return held & (order < count[:, None])
