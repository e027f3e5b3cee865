"""One-update displacement of a policy's answers to fixed prompts, with fixed weights (arXiv 2512.04220, as in
arXiv 2505.18830): each prompt's group makes one optimiser step from the same weights, which are put back
afterwards.

The displacement of a run's batches mixes two things that change: the prompts and the weights. Here the
prompts are the same at every checkpoint, and no group feels the update of another.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from services.common.errors import UserError
from services.contracts import Question, TrainBatch, Trajectory, TrajectoryRequest
from services.rollout.worker.tokenizer import load_tokenizer
from services.rollout.worker.worker import RolloutWorker
from trainer.config.schema import Config
from trainer.data import PromptCursor
from trainer.learner.group import gathered
from trainer.learner.rank import LearnerRank
from trainer.loop.rollouts.sampling import BatchSampler, RolloutBatch
from trainer.loop.update import similarity
from trainer.loop.update.batches import prepare
from trainer.rewards import make_reward

Say = Callable[[str], None]


@dataclass(frozen=True)
class Response:
    """One sampled answer. displacement: mean change per token of its own log-probs by its group's step, in
    nats; None where the group teaches nothing, so that no step was taken."""

    right: bool
    reward: float | None
    advantage: float
    tokens: int
    searches: int
    displacement: float | None


@dataclass(frozen=True)
class Group:
    """The answers to one prompt. similarity: of their hidden states, by kind of pair; empty where not both
    right and wrong ones are there."""

    question: str
    responses: list[Response]
    similarity: dict[str, similarity.Alike] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """displacement: by row, float64 [B]; similarity: by group."""

    displacement: np.ndarray
    similarity: list[dict[str, similarity.Alike]]


@dataclass(frozen=True)
class _OneWorker:
    """What the sampler of batches asks of a pool, by one worker in this process."""

    worker: RolloutWorker

    async def rollout(
        self, requests: list[TrajectoryRequest], on_done: Callable[[Trajectory], None] | None = None
    ) -> list[Trajectory]:
        return await self.worker.rollout_batch(requests)


def settings_for(config: Config, prompts: int, samples: int) -> Config:
    """The run's settings with one optimiser step per group, at its learning rate without schedule, from a
    fresh AdamW: the moments of a checkpoint would push along what earlier batches taught. In float32: the
    step of most weights is lost between two bfloat16 numbers. Raises UserError for a run with adapters, whose
    update this is not."""
    if config.learner.lora is not None:
        raise UserError("displacement: learner.lora is set; runs that train all weights are accepted")
    rollout = config.rollout.model_copy(update={"prompts_per_step": prompts, "group_size": samples})
    algorithm = config.algorithm.model_copy(update={"kl": 0.0, "dynamic_sampling": 0})
    learner = config.learner.model_copy(
        update={
            "ranks": 1, "zero_stage": 0, "minibatches_per_batch": 1, "epochs": 1, "warmup_steps": 0,
            "warmup_batches": 0, "warmup_share": 0.0, "schedule": "constant", "match_kl": None,
            "offload_optimizer": False, "compile": False,
            "dtype": "float64" if config.learner.dtype == "float64" else "float32",
        }
    )  # fmt: skip
    return config.model_copy(update={"rollout": rollout, "algorithm": algorithm, "learner": learner})


def measure(
    config: Config, model: Path, retriever_url: str, questions: list[Question], samples: int, say: Say
) -> list[Group]:
    """Sample `samples` answers to each question and measure what one update does to them. config: of the
    run; model: folder of the weights in Hugging Face form."""
    config = settings_for(config, len(questions), samples)
    say(f"sampling {samples} answers to each of {len(questions)} prompts")
    batch = asyncio.run(_sampled(config, model, retriever_url, questions))
    prepared = prepare(batch, config, load_tokenizer(model))
    found = displacements(config, model, prepared.tokens, samples, say)
    groups = []
    for at in range(0, len(batch.trajectories), samples):
        responses = [
            Response(
                right=bool(batch.right[i]),
                reward=_finite(batch.rewards[i]),
                advantage=float(prepared.advantages[i]),
                tokens=sum(len(a.token_ids) for a in batch.trajectories[i].actions),
                searches=batch.trajectories[i].searches,
                displacement=_finite(found.displacement[i]),
            )
            for i in range(at, at + samples)
        ]
        question = batch.trajectories[at].question.text
        groups.append(Group(question, responses, found.similarity[at // samples]))
    return groups


async def _sampled(
    config: Config, model: Path, retriever_url: str, questions: list[Question]
) -> RolloutBatch:
    worker = RolloutWorker(
        "w0",
        config.rollout,
        model_path=str(model),
        retriever_url=retriever_url,
        retriever_timeout_seconds=config.retriever.timeout_seconds,
        seed=config.seed,
    )
    await worker.start()
    try:
        pool: Any = _OneWorker(worker)
        cursor = PromptCursor(questions, config.seed, shuffle=False)
        sampler = BatchSampler(config, pool, cursor, make_reward(config.reward.kind))
        with closing(sampler.calls):
            return await sampler.sample(0)
    finally:
        await worker.close()


def displacements(config: Config, model: Path, batch: TrainBatch, size: int, say: Say) -> Measured:
    """Mean change per token of each row in nats: groups of `size` rows, one optimiser step each from the
    weights of `model`. NaN for the rows of a group that makes no step. The similarity of hidden states is
    that of the weights before the step."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    rank = LearnerRank(config, model_path=str(model), reference=False, rank=0)
    rank.setup("127.0.0.1", rank.host_store("127.0.0.1"))
    try:
        start = {name: weight.clone() for name, weight, _ in rank.engine.iter_master()}
        found = np.full(len(batch), np.nan)
        alike: list[dict[str, similarity.Alike]] = []
        for at in range(0, len(batch), size):
            rows = list(range(at, min(at + size, len(batch))))
            group = batch.take(rows)
            alike.append(_alike(rank, group))
            if not np.any(group.advantages):
                continue
            done = rank.update(group, llds_lambda=0.0, answer_beta=1.0, lr_scale=1.0)
            if not done.steps or any(step.skipped for step in done.steps):
                continue
            before = gathered(group, [done.scores])
            after = gathered(group, [rank.score(group)])
            # Without moments too: each group's step is AdamW's first.
            rank.engine.load_master(start.__getitem__, None, 0)
            for i, row in enumerate(rows):
                written = group.action_ids[group.row(i)] >= 0
                change = (after.logp - before.logp)[group.row(i)][written]
                found[row] = change.mean() if len(change) else np.nan
        say(f"{int(np.isfinite(found).sum())} answers are of groups that teach something")
        return Measured(found, alike)
    finally:
        rank.shutdown()


def _alike(rank: LearnerRank, group: TrainBatch) -> dict[str, similarity.Alike]:
    right = [] if group.right is None else [bool(one) for one in group.right]
    if len(set(right)) < 2:
        return {}
    return similarity.of_group(group, rank.hidden_states(group), right)


def summary(groups: list[Group]) -> dict[str, Any]:
    """Counts, and the share and median displacement of right and wrong answers, over the groups that made a
    step."""
    moved = [r for group in groups for r in group.responses if r.displacement is not None]
    found: dict[str, Any] = {
        "prompts": len(groups),
        "responses": sum(len(group.responses) for group in groups),
        "moved": len(moved),
    }
    for name, right in (("right", True), ("wrong", False)):
        values = [r.displacement for r in moved if r.right == right and r.displacement is not None]
        found[name] = {
            "responses": len(values),
            "fell": sum(v < 0 for v in values) / len(values) if values else None,
            "median": float(np.median(values)) if values else None,
        }
    found["similarity"] = similarity.summary([group.similarity for group in groups])
    return found


def record(groups: list[Group], **about: Any) -> dict[str, Any]:
    """The file that `unspiral report --paper` draws."""
    return {**about, "summary": summary(groups), "groups": [asdict(group) for group in groups]}


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
