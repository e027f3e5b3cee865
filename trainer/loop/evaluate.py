"""Scoring held-out questions: every row once, in order, none dropped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from services.contracts import Question, Trajectory, TrajectoryRequest
from services.rollout.pool.pool import RolloutPool
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
