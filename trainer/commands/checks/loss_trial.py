"""One call of a user's policy loss, as the learner makes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from services.common.errors import UserError
from services.common.loading.user_code import calling
from trainer.algorithms import users_policy_loss
from trainer.config.schema import Config


def gradient(where: str, loss: Callable[..., Any], config: Config) -> float:
    """The loss's gradient by the log-probs of a good answer, summed over its tokens, where the policy is
    still the one that sampled: below 0 a step makes them likelier. Raises UserError for a function that
    fails, and for a loss or a gradient that is missing or not finite."""
    logp = torch.tensor([[-0.5, -1.0, -2.0], [-0.5, -1.0, -2.0]], requires_grad=True)
    actions = torch.tensor([[0, 0, 1], [0, 0, -1]])
    advantages = torch.tensor([1.0, -1.0])
    low, high = config.algorithm.clip_low, config.algorithm.clip_high
    with calling(where, passes=(UserError,)):
        for moved in (0.0, 0.5):  # the first optimiser step of a batch, and a later one
            logp.grad = None
            old = logp.detach() - moved
            term = users_policy_loss(loss, logp, old, advantages, actions, clip_low=low, clip_high=high)
            term.loss_sum.backward()
            found = {"loss": float(term.loss_sum.detach()), "gradient": float(_of(logp).sum())}
            for name, value in found.items():
                if not math.isfinite(value):
                    raise UserError(
                        f"{where}: its {name} is {value}, of log-probs -0.5 to -2; expected a finite number"
                    )
            if not moved:
                first = float(_of(logp)[0].sum())
    return first


def _of(logp: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(logp) if logp.grad is None else logp.grad
