"""What is broken on purpose in a run, from step BEGINS on: the retriever, the reward, the sampler's weights,
its support, the policy itself. The same seed breaks the same things."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from retriever_service.client import Hit
from retriever_service.search.index import Index
from services.contracts import Trajectory, TrajectoryRequest
from services.rollout.worker.loop import Found
from trainer.lab.tokenizer import TAGS

BEGINS = 40
"""First step of a fault: later than the baselines of the monitor, which end after 30 values."""


class Fault:
    """Nothing is broken. Subclasses override what they break; every hook is called at every step."""

    begins = BEGINS

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.step = 0
        """The step whose batch is being sampled."""
        self.training = True
        """Whether it is a step's batch, and not an evaluation."""

    @property
    def on(self) -> bool:
        return self.step >= self.begins

    def drawn(self, what: str) -> random.Random:
        """Randomness of one thing at one step, whatever else is drawn before it."""
        return random.Random(f"{self.seed}-{self.step}-{what}")

    def sampling(self, requests: list[TrajectoryRequest]) -> None:
        """A batch of the pool begins. Uids of training begin with the step."""
        first = requests[0].uid.split("-")[0]
        self.training = first.isdecimal()
        self.step = int(first) if self.training else self.step

    def engine(self, engine: Any, tokenizer: Any, settings: Any) -> None:
        """The sampler, once it has started."""

    def found(self, query: str, hits: list[Hit], index: Index) -> Found:
        """What the agent gets for a search."""
        return Found(hits, 0)

    def reward(self, trajectory: Trajectory, earned: float | None) -> float | None:
        """What the trainer takes for the reward."""
        return earned

    def sent(self, weights: dict[str, torch.Tensor], version: int) -> dict[str, torch.Tensor]:
        """What the sampler takes for the weights of `version`."""
        return weights

    def updated(self, rank: Any) -> None:
        """The learner's rank after the optimiser steps of a batch."""


class SilentTool(Fault):
    """Searches return no document."""

    def found(self, query: str, hits: list[Hit], index: Index) -> Found:
        return Found([] if self.on else hits, 0)


class EmptyDocuments(Fault):
    """Documents have a title and no text."""

    def found(self, query: str, hits: list[Hit], index: Index) -> Found:
        if not self.on:
            return Found(hits, 0)
        return Found([Hit(hit.id, hit.contents.partition("\n")[0], hit.score) for hit in hits], 0)


class NoisyRetriever(Fault):
    """Four of five searches return documents at random."""

    SHARE = 0.8

    def found(self, query: str, hits: list[Hit], index: Index) -> Found:
        draw = self.drawn(query)
        if not self.on or draw.random() >= self.SHARE:
            return Found(hits, 0)
        rows = draw.sample(range(index.documents.count), len(hits))
        return Found([Hit(*index.documents.get(row), None) for row in rows], 0)


class StuckRetriever(Fault):
    """Searches return the same two documents."""

    def found(self, query: str, hits: list[Hit], index: Index) -> Found:
        return Found([Hit(*index.documents.get(row), None) for row in (0, 1)] if self.on else hits, 0)


class FailingRetriever(Fault):
    """Every second search is answered at the second try only."""

    def found(self, query: str, hits: list[Hit], index: Index) -> Found:
        return Found(hits, int(self.on and self.drawn(query).random() < 0.5))


class JudgeDown(Fault):
    """No trajectory has a reward, for five steps."""

    STEPS = 5

    def reward(self, trajectory: Trajectory, earned: float | None) -> float | None:
        down = self.begins <= self.step < self.begins + self.STEPS
        return None if down and self.training else earned


class PaidForForm(Fault):
    """The reward in training is 1 for any answer."""

    def reward(self, trajectory: Trajectory, earned: float | None) -> float | None:
        if not (self.on and self.training):
            return earned
        return float(trajectory.finish == "answer")


class LuckyGarbage(Fault):
    """Seven of ten trajectories are paid in training, whatever they say."""

    SHARE = 0.7

    def reward(self, trajectory: Trajectory, earned: float | None) -> float | None:
        if not (self.on and self.training):
            return earned
        return float(self.drawn(trajectory.uid).random() < self.SHARE)


class Mismatch(Fault):
    """The sampler's weights differ from the learner's by noise of 40 % of each tensor's own spread."""

    SHARE = 0.4

    def sent(self, weights: dict[str, torch.Tensor], version: int) -> dict[str, torch.Tensor]:
        if version + 1 < self.begins:
            return weights
        noise = torch.Generator().manual_seed(self.seed * 100_003 + version)
        return {
            name: w + self.SHARE * w.std(correction=0) * torch.randn(w.shape, generator=noise)
            for name, w in weights.items()
        }


class Leak(Fault):
    """One in five names can't be sampled any more; the learner's softmax still holds it."""

    EVERY = 5

    def engine(self, engine: Any, tokenizer: Any, settings: Any) -> None:
        names = [f"n{i}" for i in range(0, 240, self.EVERY)]
        ids = torch.tensor(tokenizer.convert_tokens_to_ids(names))
        sample: Callable[[Any, torch.Tensor], int] = engine._next

        def masked(row: Any, logits: torch.Tensor) -> int:
            return sample(row, logits.index_fill(0, ids, float("-inf")) if self.on else logits)

        engine._next = masked


class ShortTurns(Fault):
    """A turn is cut off after six tokens, which no whole action fits into."""

    TOKENS = 6

    def engine(self, engine: Any, tokenizer: Any, settings: Any) -> None:
        self.settings = settings

    def sampling(self, requests: list[TrajectoryRequest]) -> None:
        super().sampling(requests)
        if self.on:
            self.settings.max_response_tokens = self.TOKENS


class ControlShock(Fault):
    """The embeddings of the tags, which are the rows of the output layer too, get noise of twice
    their spread, once."""

    SHARE = 2.0

    def engine(self, engine: Any, tokenizer: Any, settings: Any) -> None:
        self.tags = torch.tensor(tokenizer.convert_tokens_to_ids(list(TAGS)))
        self.done = False

    def updated(self, rank: Any) -> None:
        if not self.on or self.done:
            return
        self.done = True
        weight = rank.engine.policy.hf.get_input_embeddings().weight
        noise = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            rows = weight[self.tags]
            weight[self.tags] = rows + self.SHARE * rows.std() * torch.randn(rows.shape, generator=noise)
