"""What every loss returns, and how it reads values under the action mask."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from trainer.algorithms.shapes import ActionIds, PerToken, PerTrajectory, TokenMask, TrajectoryMask

POLICY_STATS = ("clipped_tokens", "action_tokens", "ratio_max")
"""The stats of every policy loss: `trainer.learner.objective` makes the metrics `policy/clip_fraction`,
`learner/action_tokens` and `ratio/max` from them."""
NOT_SUMMED = frozenset({"ratio_max", "clip_fraction"})
"""Stats that the learner does not add up over micro-batches: of `ratio_max` it takes the largest, and it
computes the clip fraction of a step from sums."""


class LossTerm:
    """A loss as a sum and a count, to be divided by the count of the whole optimiser step (all micro-batches,
    all ranks).

    loss_sum: 0-dim tensor to be minimised, differentiable. count: float; it depends on masks and advantages
    alone. stats: dict of floats, each a sum over tokens, actions or trajectories, except for NOT_SUMMED; a
    policy loss has at least POLICY_STATS. Count and stats are brought from the device together, when one of
    them is first read: read them after `loss_sum` is used, and no kernel waits.
    """

    def __init__(self, loss_sum: Tensor, count: Tensor, stats: dict[str, Tensor] | None = None) -> None:
        self.loss_sum = loss_sum
        self._numbers = {"count": count.detach(), **{k: v.detach() for k, v in (stats or {}).items()}}

    @cached_property
    def _floats(self) -> dict[str, float]:
        numbers = list(self._numbers.values())
        if len({n.dtype for n in numbers}) > 1:
            numbers = [n.double() for n in numbers]
        values = [float(v) for v in torch.stack(numbers).tolist()]
        return dict(zip(self._numbers, values, strict=True))

    @property
    def count(self) -> float:
        return self._floats["count"]

    @property
    def stats(self) -> dict[str, float]:
        return {k: v for k, v in self._floats.items() if k != "count"}

    def __repr__(self) -> str:
        return f"LossTerm(loss_sum={self.loss_sum.item():.6g}, count={self.count:g}, stats={self.stats})"


def select(mask: Tensor, values: Tensor) -> Tensor:
    """Values under the mask, 0 elsewhere, at least fp32. A selection, not a product: whatever lies outside
    the mask, NaN and infinity included, reaches neither the value nor the gradient."""
    if values.dtype in (torch.bfloat16, torch.float16):
        values = values.float()
    return torch.where(mask, values, 0.0)


def check_shapes(
    action_ids: ActionIds,
    *tokens: PerToken | TokenMask | None,
    rows: tuple[PerTrajectory | TrajectoryMask | None, ...] = (),
) -> None:
    """Raise ValueError unless action_ids is [B, T], each of `tokens` is [B, T], and each of `rows` is [B];
    None passes. (Shapes that broadcast would give a plausible, wrong loss.)"""
    if action_ids.ndim != 2:
        raise ValueError(f"action_ids must be [B, T], not {tuple(action_ids.shape)}")
    for x in tokens:
        if x is not None and x.shape != action_ids.shape:
            raise ValueError(
                f"expected [B, T] = {tuple(action_ids.shape)} as action_ids has, not {tuple(x.shape)}"
            )
    for x in rows:
        if x is not None and x.shape != action_ids.shape[:1]:
            raise ValueError(
                f"expected [B] = {tuple(action_ids.shape[:1])}, one value per trajectory, "
                f"not {tuple(x.shape)}"
            )
