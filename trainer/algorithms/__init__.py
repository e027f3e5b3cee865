"""Losses and advantages as pure functions on tensors; torch alone. docs/algorithms.md has formulas and
sources."""

from trainer.algorithm_names import AdvantageKind, PolicyLossKind
from trainer.algorithms.advantages import group_advantages, zero_variance
from trainer.algorithms.answer_weight import answer_beta
from trainer.algorithms.covariance import chosen_tokens
from trainer.algorithms.fused import plain_token_logprobs, token_logprobs
from trainer.algorithms.importance import importance_weights, mismatch_masks
from trainer.algorithms.losses.kl import entropy_bonus, kl_batch_start, kl_k3
from trainer.algorithms.losses.llds import llds_loss
from trainer.algorithms.losses.nll import nll_loss
from trainer.algorithms.losses.policy_loss import policy_loss
from trainer.algorithms.losses.users_loss import TokenLoss, users_policy_loss
from trainer.algorithms.lottery import token_lottery
from trainer.algorithms.overlong import overlong_penalty
from trainer.algorithms.terms import LossTerm

__all__ = [
    "AdvantageKind",
    "LossTerm",
    "PolicyLossKind",
    "answer_beta",
    "chosen_tokens",
    "entropy_bonus",
    "group_advantages",
    "importance_weights",
    "kl_batch_start",
    "kl_k3",
    "llds_loss",
    "mismatch_masks",
    "nll_loss",
    "overlong_penalty",
    "plain_token_logprobs",
    "policy_loss",
    "TokenLoss",
    "users_policy_loss",
    "token_logprobs",
    "token_lottery",
    "zero_variance",
]
