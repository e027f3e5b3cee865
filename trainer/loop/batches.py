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
    """A batch for the learner. `right` marks trajectories that the reward calls right (they feed the probes)."""

    tokens: TokenBatch
    advantages: np.ndarray  # float64 [B]
    right: np.ndarray  # bool [B]


def advantages_of(rewards: np.ndarray, groups: list[str], kind: str) -> np.ndarray:
    """`trainer.algorithms.group_advantages` for rewards [B] and group uids [B], in float64."""
    index = {g: i for i, g in enumerate(dict.fromkeys(groups))}
    ids = torch.tensor([index[g] for g in groups], dtype=torch.long)
    return group_advantages(torch.as_tensor(rewards, dtype=torch.float64), ids, kind).numpy()


def prepare(batch: RolloutBatch, config: Config, tokenizer: Any) -> Prepared:
    """Pack the trajectories and add the learner's columns: advantages, the preserved set, rows to leave out, answer spans."""
    tokens = TokenBatch.of(batch.trajectories)
    valid = np.isfinite(batch.rewards)
    advantages = advantages_of(
        batch.rewards, [t.group for t in batch.trajectories], config.algorithm.advantage
    )
    # Where the reward is more than the answer's worth (form, length), a wrong answer may have some and a right one none.
    good = batch.em > 0 if config.reward.kind in ("em", "format") else np.nan_to_num(batch.rewards) > 0
    preserved = valid & (advantages >= 0)
    right = preserved & good
    if config.algorithm.llds.preserve == "right":
        preserved = right
    tokens.extra |= {
        "advantages": advantages.astype(np.float32),
        "preserved": preserved,
        "valid": valid,
        "right": right,
    }
    if config.algorithm.llds.answer_weight != "off":
        tokens.extra["answer_mask"] = np.concatenate([answer_mask(t, tokenizer) for t in batch.trajectories])
    return Prepared(tokens, advantages, right)
