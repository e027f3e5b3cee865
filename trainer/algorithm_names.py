"""The names by which a configuration chooses a loss, an advantage and their variants.

`trainer.config` and `trainer.algorithms` share these lists. They stand outside `trainer.algorithms`, because
importing that package imports torch, and `unspiral config show` works without torch.
"""

from __future__ import annotations

from typing import Literal, TypeGuard, get_args

PolicyLossKind = Literal["grpo", "grpo_seq", "dr_grpo", "dapo", "gspo", "cispo", "clip_cov", "kl_cov"]


def is_known_loss(name: str) -> TypeGuard[PolicyLossKind]:
    """Whether it names a loss of ours; otherwise it is the import path of the user's own."""
    return name in get_args(PolicyLossKind)


AdvantageKind = Literal["grpo", "dr_grpo", "rloo"]
Gate = Literal["action", "response", "token", "random"]
"""Unit of LLDS whose summed log-prob must have fallen; `random` is a control."""
Form = Literal["llds", "sapo_search", "nll"]
"""The regulariser on the preserved set."""
Denominator = Literal["preserved", "all"]
"""Token count that divides the sum of LLDS."""
AnswerSchedule = Literal["off", "paper", "code"]
ImportanceMode = Literal["off", "token", "sequence_mask"]
