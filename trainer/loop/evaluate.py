"""Scoring held-out questions: every row once, in order, none dropped."""

from __future__ import annotations

import asyncio
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from services.contracts import Question, Trajectory, TrajectoryRequest
from services.likelihood.metrics.verdicts import is_right, known_rewards
from services.rollout.pool.pool import RolloutPool
from trainer.config.schema import Config, ConfigError
from trainer.loop.sampling import seed_of
from trainer.rewards import Reward, RewardError, make_reward, right_at


def table(trajectories: list[Trajectory], reward: Reward | None, least: float) -> dict[str, Any]:
    """`{"overall": {"em", "f1", "right", "n"}, "sources": {name: the same}}`. right: share of those with a reward that earned `least`."""
    scores = {"em": make_reward("em"), "f1": make_reward("f1"), "right": reward or _unknown}
    by_source: dict[str, list[list[float | None]]] = defaultdict(list)
    for t in trajectories:
        by_source[t.question.data_source].append([score(t) for score in scores.values()])

    def mean(rows: list[list[float | None]]) -> dict[str, float]:
        em, f1, rewards = (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [])
        known = np.isfinite(known_rewards(rewards))
        out = {"em": sum(em) / len(rows) if rows else 0.0, "f1": sum(f1) / len(rows) if rows else 0.0}
        if known.any():
            out["right"] = float(is_right(rewards, least)[known].mean())
        return out | {"n": len(rows)}

    return {
        "overall": mean([row for rows in by_source.values() for row in rows]),
        "sources": {name: mean(rows) for name, rows in sorted(by_source.items())},
    }


def _unknown(trajectory: Trajectory) -> None:
    """Of a reward function that is not there."""


async def evaluate(
    pool: RolloutPool,
    questions: list[Question],
    *,
    tag: str,
    temperature: float,
    seed: int,
    reward: Reward | None,
    least: float,
    retriever_url: str | None = None,
    on_done: Callable[[Trajectory], None] | None = None,
) -> tuple[dict[str, Any], list[Trajectory]]:
    """One trajectory for each question (temperature 0 is greedy); the table of scores, and the trajectories. least: the reward of a right
    answer (`right_at`)."""
    requests = []
    for i, question in enumerate(questions):
        uid = f"eval-{tag}-{i:06d}"
        requests.append(TrajectoryRequest(uid, uid, question, seed_of(seed, uid), temperature, retriever_url))
    trajectories = await pool.rollout(requests, on_done=on_done)
    return table(trajectories, reward, least), trajectories


def run_eval(
    config: Config,
    *,
    checkpoint: Path | None = None,
    data: Path | None = None,
    limit: int | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """`unspiral eval`: greedy scores of a checkpoint's weights (or of model.path) on `data` (or data.eval): all rows, or `limit`.

    Raises Stopped after a clean stop by SIGINT or SIGTERM.
    """
    from trainer.data import models
    from trainer.learner.checkpoint import export_checkpoint
    from trainer.session.signals import cancelled_by_signals, raised_by_signals
    from trainer.session.system import start_serving

    updates = {"data": config.data.model_copy(update={"eval": str(data) if data else config.data.eval})}
    updates["evaluation"] = config.evaluation.model_copy(update={"limit": limit})
    config = config.model_copy(update=updates)
    if config.data.eval is None:
        raise ConfigError("eval: no questions given; pass --data FILE or set data.eval")

    try:
        reward = make_reward(config.reward.kind)
    except RewardError as e:  # exact match and F1 need none
        say(f"{e}; what it calls right is left out")
        reward = None

    async def score(model: Path) -> dict[str, Any]:
        async with (
            cancelled_by_signals(say),
            start_serving(config, model, say, lambda event: None) as serving,
        ):
            say("starting rollout workers")
            await serving.pool.start()
            say(f"scoring {len(serving.eval_questions)} questions")
            scores, _ = await evaluate(
                serving.pool,
                serving.eval_questions,
                tag="eval",
                temperature=0.0,
                seed=config.seed,
                reward=reward,
                least=right_at(reward, config.reward.right_at),
                retriever_url=serving.eval_retriever_url,
            )
            return scores

    if checkpoint is None:
        return asyncio.run(score(models.resolve(config.model.path)))
    with tempfile.TemporaryDirectory(prefix="unspiral-eval-") as folder:
        with raised_by_signals():
            export_checkpoint(checkpoint, Path(folder) / "model")
        return asyncio.run(score(Path(folder) / "model"))
