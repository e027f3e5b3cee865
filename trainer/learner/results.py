"""What learner ranks answer, and what the group makes of their answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from trainer.learner.objective import StepStats


@dataclass(frozen=True)
class RankInfo:
    """Where a rank runs, and what it trains."""

    pid: int
    host: str
    device: str
    """PyTorch's name of it, e.g. `cuda:0`."""
    device_name: str
    """Its model by the vendor, or `CPU`."""
    device_uuid: str
    """Empty on CPU."""
    dtype: str
    """Of the weights in the forward pass: `bfloat16`, `float32` or `float64`."""
    lora: bool
    """Whether it trains LoRA adapters."""
    parameters: int
    """The model's parameters, without the input embedding and the output layer."""
    head_parameters: int
    """Parameters of the output layer, whether it is tied to the input embedding or not."""
    activations: str = ""
    """Whether activations are kept or computed again, in one line; empty where that was not to be decided."""


class RankScores(NamedTuple):
    """A rank's share of a batch, its rows one after another in the order of `rows`."""

    rows: list[int]
    """Index of each row in the batch."""
    logp: np.ndarray
    """Log-probs in nats, 0 outside the action mask: float32 [sum of the rows' lengths]."""
    entropy: np.ndarray
    """Entropies in nats, of the same form."""


class RankUpdate(NamedTuple):
    """What a rank did with one batch."""

    scores: RankScores
    """Under the weights before the first optimiser step."""
    steps: list[StepStats]
    """One entry per optimiser step; the counts are this rank's own."""
    metrics: dict[str, float]
    """Metrics that need no counts of other ranks, by name."""
    told: tuple[str, ...] = ()
    """What has changed in how the rank works, in words."""


@dataclass(frozen=True)
class Scores:
    """Log-probs and entropies of a batch in nats, 0 outside the action mask: float32 [sum T] each."""

    logp: np.ndarray
    entropy: np.ndarray


@dataclass(frozen=True)
class UpdateResult:
    """One batch's update."""

    logp_old: np.ndarray
    """Log-probs under the weights before the first optimiser step: float32 [sum T], nats."""
    entropy_old: np.ndarray
    """Entropies under the same weights: float32 [sum T], nats."""
    metrics: dict[str, float]
    skipped_steps: int
    """Optimiser steps that were not taken because the loss or the gradient norm was not finite."""
    told: tuple[str, ...] = ()
    """What has changed in how the ranks work, in words: lack of memory."""

    @property
    def moved(self) -> bool:
        """Whether the weights differ from those before the update."""
        return self.metrics["learner/optimiser_steps"] + self.metrics.get("supervised/steps", 0.0) > 0

    @property
    def idle(self) -> bool:
        """Whether no step was due: nothing in the batch could act."""
        return not self.moved and not self.skipped_steps
