"""Which tokens clip-cov and kl-cov act on (arXiv 2505.22617): those whose log-prob and advantage vary
together, since these lower the entropy most."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def token_covariance(logp: Tensor, advantages: Tensor) -> Tensor:
    """`(logp - mean logp) (A - mean A)` of N tokens, in float64; 0 where either is not finite, and such
    tokens are in neither mean.

    logp [N] in nats, advantages [N]: each token has its trajectory's."""
    known = torch.isfinite(logp) & torch.isfinite(advantages)
    count = known.sum().clamp(min=1)
    centred = []
    for values in (logp, advantages):
        values = torch.where(known, values.double(), 0.0)
        centred.append(torch.where(known, values - values.sum() / count, 0.0))
    return centred[0] * centred[1]


def chosen_tokens(
    kind: Literal["clip_cov", "kl_cov"],
    logp: Tensor,
    advantages: Tensor,
    *,
    share: float,
    low: float,
    high: float,
    generator: torch.Generator,
) -> Tensor:
    """The tokens that the loss `kind` acts on, bool [N], of all N action tokens of an optimiser step.

    `max(1, floor(share N))` tokens at most. `clip_cov`: drawn at random from those with a covariance between
    `low` and `high` (neither included). `kl_cov`: those with the largest covariances above 0.
    """
    covariance = token_covariance(logp, advantages)
    chosen = torch.zeros(len(covariance), dtype=torch.bool)
    most = max(1, int(share * len(covariance)))
    if kind == "clip_cov":
        candidates = torch.nonzero((covariance > low) & (covariance < high))[:, 0]
        picked = candidates[torch.randperm(len(candidates), generator=generator)[:most]]
    else:
        order = torch.sort(covariance, descending=True, stable=True).indices[:most]
        picked = order[covariance[order] > 0]
    chosen[picked] = True
    return chosen
