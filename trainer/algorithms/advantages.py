"""Advantages: how much better a trajectory did than the others that answered the same prompt."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from trainer.algorithm_names import AdvantageKind
from trainer.algorithms.shapes import PerTrajectory, TrajectoryMask


def group_advantages(rewards: PerTrajectory, group_ids: Tensor, kind: AdvantageKind) -> PerTrajectory:
    """One advantage for each trajectory; the same holds for each of its action tokens.

    rewards [B], group_ids [B] (any integers, rows in any order), result [B] in the rewards' float dtype:

    - `grpo` (arXiv 2402.03300): `(r - mean) / (std + 1e-6)`, unbiased std; a group of one gives `r / (1 +
      1e-6)`.
    - `dr_grpo` (arXiv 2503.20783): `r - mean`; a group of one gives 0.
    - `rloo` (arXiv 2402.14740): `r -` mean of the others; a group of one gives 0.

    Where all rewards of a group of two or more are equal, and for a reward that is its group's mean but for
    rounding, the advantage is exactly 0. A reward that is not finite is left out of its group's statistics
    and gets 0 (the caller removes that row from every loss); a group that so loses all but one gives 0.

    >>> group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0]), torch.tensor([7, 7, 7, 9, 9]), "dr_grpo")
    tensor([ 0.6667, -0.3333, -0.3333,  0.0000,  0.0000])
    """
    if kind not in get_args(AdvantageKind):
        raise ValueError(f"unknown advantage {kind!r}; known: {', '.join(get_args(AdvantageKind))}")
    group, finite, born, left, equal = _groups(rewards, group_ids)
    # float64, so that "is its group's mean" does not hang on the order of a sum.
    r = torch.where(finite, rewards.double(), 0.0)
    zeros, n, others = r.new_zeros(len(born)), left.clamp(min=1).double(), (left - 1).clamp(min=1).double()
    mean = zeros.scatter_add(0, group, r) / n
    centred = torch.where(finite, r - mean[group], 0.0)
    # .2 among .1, .2, .3 is its group's mean, and rounding must not make it a wrong answer.
    rounding = 4 * torch.finfo(torch.float64 if rewards.dtype == torch.float64 else torch.float32).eps
    centred = torch.where(
        centred.abs() <= rounding * zeros.scatter_reduce(0, group, r.abs(), "amax")[group], 0.0, centred
    )
    if kind == "grpo":
        variance = zeros.scatter_add(0, group, centred**2) / others
        several = centred / (variance.sqrt()[group] + 1e-6)
        alone = r / (1 + 1e-6)
    else:
        several = centred * (n / others)[group] if kind == "rloo" else centred
        alone = torch.zeros_like(r)
    result = torch.where((left < 2)[group] | equal[group], 0.0, several)
    # A group of one by design has a value of its own. One that has lost its others has not: nothing is left
    # to compare with.
    result = torch.where((born == 1)[group] & finite, alone, result)
    return result.to(rewards.dtype if rewards.is_floating_point() else torch.get_default_dtype())


def zero_variance(rewards: PerTrajectory, group_ids: Tensor) -> TrajectoryMask:
    """True [B] for trajectories of groups that teach nothing: two or more members, all finite rewards equal
    (or none finite).

    What `groups/zero_variance` counts and DAPO's dynamic sampling (arXiv 2503.14476, section 3.2)
    replaces."""
    group, _, born, left, equal = _groups(rewards, group_ids)
    return ((born > 1) & (equal | (left == 0)))[group]


def _groups(rewards: PerTrajectory, group_ids: Tensor) -> tuple[Tensor, ...]:
    """(group of each row, row is finite, and by group: members, finite members, whether those are all
    equal)."""
    if rewards.ndim != 1 or rewards.shape != group_ids.shape:
        raise ValueError(
            f"rewards and group_ids must both be [B], not {tuple(rewards.shape)} and {tuple(group_ids.shape)}"
        )
    # `born` counts all members, `left` those with a finite reward.
    _, group, born = torch.unique(group_ids, return_inverse=True, return_counts=True)
    finite = torch.isfinite(rewards)
    left = torch.zeros_like(born).scatter_add(0, group, finite.long())
    r = rewards.double()
    high = r.new_full((len(born),), -torch.inf).scatter_reduce(
        0, group, torch.where(finite, r, -torch.inf), "amax"
    )
    low = r.new_full((len(born),), torch.inf).scatter_reduce(
        0, group, torch.where(finite, r, torch.inf), "amin"
    )
    return group, finite, born, left, high == low
