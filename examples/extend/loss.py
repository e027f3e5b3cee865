"""A policy loss: REINFORCE with an importance weight, which no clip bounds."""

from torch import Tensor


def reinforce(
    logp: Tensor, logp_old: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    return -(logp - logp_old).exp() * advantages
