"""From scored trajectories to the learner's batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from services.contracts import TokenBatch, TrainBatch
from services.likelihood.metrics.scored_step import ScoredStep
from services.likelihood.metrics.text_metrics import control_mask
from trainer.algorithms import AdvantageKind, group_advantages
from trainer.config.schema import Config
from trainer.learner.results import UpdateResult
from trainer.loop.rollouts.sampling import RolloutBatch
from trainer.loop.update.probes import Rescored
from trainer.rewards import answer_mask


@dataclass(frozen=True)
class Prepared:
    """A batch for the learner, and what the step's records say of its trajectories."""

    tokens: TrainBatch
    """`logp_old` is set once the learner has scored them."""
    advantages: np.ndarray
    """float64 [B]."""
    right: list[bool | None]
    """What the reward function says of each trajectory; None where it gave no reward."""
    control: np.ndarray
    """The tag tokens: bool [sum T]."""


def advantages_of(rewards: np.ndarray, groups: list[str], kind: AdvantageKind) -> np.ndarray:
    """`trainer.algorithms.group_advantages` for rewards [B] and group uids [B], in float64."""
    index = {group: i for i, group in enumerate(dict.fromkeys(groups))}
    ids = torch.tensor([index[group] for group in groups], dtype=torch.long)
    return group_advantages(torch.as_tensor(rewards, dtype=torch.float64), ids, kind).numpy()


def scored_step(
    batch: RolloutBatch, prepared: Prepared, update: UpdateResult, rescored: Rescored
) -> ScoredStep:
    """The step after its update, of which metrics and records are views."""
    return ScoredStep(
        trajectories=batch.trajectories,
        tokens=prepared.tokens,
        rewards=batch.rewards.tolist(),
        advantages=prepared.advantages,
        right=prepared.right,
        entropy=update.entropy_old,
        logp_new=rescored.logp_new if rescored.rows else None,
        control=prepared.control,
        preserved=prepared.tokens.preserved,
    )


def prepare(batch: RolloutBatch, config: Config, tokenizer: Any) -> Prepared:
    """Pack the trajectories and add the learner's columns: advantages, the preserved set, rows to leave out,
    answer spans."""
    valid = np.isfinite(batch.rewards)
    groups = [t.group for t in batch.trajectories]
    advantages = advantages_of(batch.rewards, groups, config.algorithm.advantage)
    # An advantage of 0 counts too: a group in which all are right teaches nothing, and its answers are to be
    # held.
    preserved = valid & (advantages >= 0)
    if config.algorithm.llds.preserve == "right":
        preserved &= batch.right
    spans = None
    if config.algorithm.llds.answer_weight != "off":
        # Found in the text, token by token: only where something reads it.
        spans = np.concatenate([answer_mask(t, tokenizer) for t in batch.trajectories])
    tokens = TrainBatch.of_tokens(
        TokenBatch.of(batch.trajectories),
        advantages=advantages.astype(np.float32),
        preserved=preserved,
        valid=valid,
        right=batch.right,
        answer_mask=spans,
    )
    said = [bool(right) if known else None for right, known in zip(batch.right, valid, strict=True)]
    return Prepared(tokens, advantages, said, control_mask(tokens, partial(text_of, tokenizer)))


def text_of(tokenizer: Any, token_ids: list[int]) -> str:
    """Some tokens as they stand, special ones included."""
    text: str = tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text
