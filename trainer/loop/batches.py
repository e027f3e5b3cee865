"""From scored trajectories to what the learner takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from services.contracts import TokenBatch
from trainer.algorithms import group_advantages
from trainer.config.schema import Config
from trainer.loop.sampling import RolloutBatch
from trainer.rewards import answer_mask


@dataclass
class Prepared:
    """A batch for the learner."""

    tokens: TokenBatch
    advantages: np.ndarray  # float64 [B]
    right: list[bool | None]
    """What the reward function says of each trajectory; None where it gave no reward."""


def advantages_of(rewards: np.ndarray, groups: list[str], kind: str) -> np.ndarray:
    """`trainer.algorithms.group_advantages` for rewards [B] and group uids [B], in float64."""
    index = {g: i for i, g in enumerate(dict.fromkeys(groups))}
    ids = torch.tensor([index[g] for g in groups], dtype=torch.long)
    return group_advantages(torch.as_tensor(rewards, dtype=torch.float64), ids, kind).numpy()


def prepare(batch: RolloutBatch, config: Config, tokenizer: Any) -> Prepared:
    """Pack the trajectories and add the learner's columns: advantages, the preserved set, rows to leave out,
    answer spans."""
    tokens = TokenBatch.of(batch.trajectories)
    valid = np.isfinite(batch.rewards)
    advantages = advantages_of(
        batch.rewards, [t.group for t in batch.trajectories], config.algorithm.advantage
    )
    preserved = valid & (advantages >= 0)
    if config.algorithm.llds.preserve == "right":
        preserved &= batch.right
    tokens.extra |= {
        "advantages": advantages.astype(np.float32),
        "preserved": preserved,
        "valid": valid,
        "right": batch.right,
    }
    if config.algorithm.llds.answer_weight != "off":
        tokens.extra["answer_mask"] = np.concatenate([answer_mask(t, tokenizer) for t in batch.trajectories])
    said = [bool(right) if known else None for right, known in zip(batch.right, valid, strict=True)]
    return Prepared(tokens, advantages, said)
