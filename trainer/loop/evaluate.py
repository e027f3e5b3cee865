"""Scoring held-out questions: every row once, in order, none dropped."""

from __future__ import annotations

import asyncio
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.contracts import Question, Trajectory, TrajectoryRequest
from services.rollout.pool.pool import RolloutPool
from trainer.config.schema import Config, ConfigError
from trainer.loop.sampling import seed_of
from trainer.rewards import make_reward


def table(trajectories: list[Trajectory]) -> dict[str, Any]:
    """`{"overall": {"em", "f1", "n"}, "sources": {name: the same}}`."""
    em, f1 = make_reward("em"), make_reward("f1")
    by_source: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for t in trajectories:
        by_source[t.question.data_source].append((em(t), f1(t)))

    def mean(pairs: list[tuple[float, float]]) -> dict[str, float]:
        n = len(pairs)
        return {
            "em": sum(p[0] for p in pairs) / n if n else 0.0,
            "f1": sum(p[1] for p in pairs) / n if n else 0.0,
            "n": n,
        }

    return {
        "overall": mean([p for pairs in by_source.values() for p in pairs]),
        "sources": {name: mean(pairs) for name, pairs in sorted(by_source.items())},
    }


async def evaluate(
    pool: RolloutPool,
    questions: list[Question],
    *,
    tag: str,
    temperature: float,
    seed: int,
    retriever_url: str | None = None,
    on_done: Callable[[Trajectory], None] | None = None,
) -> tuple[dict[str, Any], list[Trajectory]]:
    """One trajectory for each question (temperature 0 is greedy); the table of scores, and the trajectories."""
    requests = []
    for i, question in enumerate(questions):
        uid = f"eval-{tag}-{i:06d}"
        requests.append(TrajectoryRequest(uid, uid, question, seed_of(seed, uid), temperature, retriever_url))
    trajectories = await pool.rollout(requests, on_done=on_done)
    return table(trajectories), trajectories


def run_eval(
    config: Config,
    *,
    checkpoint: str | Path | None = None,
    data: Path | None = None,
    limit: int | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """`unspiral eval`: greedy scores of a checkpoint's weights (or of model.path) on `data` (or data.eval): all rows, or `limit`.

    Raises Stopped after a clean stop by SIGINT or SIGTERM.
    """
    from trainer.data import models
    from trainer.learner.checkpoint import export_checkpoint, find
    from trainer.session.signals import cancelled_by_signals, raised_by_signals
    from trainer.session.system import start_serving

    updates = {"data": config.data.model_copy(update={"eval": str(data) if data else config.data.eval})}
    updates["evaluation"] = config.evaluation.model_copy(update={"limit": limit})
    config = config.model_copy(update=updates)
    if config.data.eval is None:
        raise ConfigError("eval: no questions given; pass --data FILE or set data.eval")

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
                retriever_url=serving.eval_retriever_url,
            )
            return scores

    if checkpoint is None:
        return asyncio.run(score(models.resolve(config.model.path)))
    with tempfile.TemporaryDirectory(prefix="unspiral-eval-") as folder:
        with raised_by_signals():
            found = find(checkpoint, config.run_dir)
            say(f"weights of {found}")
            export_checkpoint(found, Path(folder) / "model")
        return asyncio.run(score(Path(folder) / "model"))
