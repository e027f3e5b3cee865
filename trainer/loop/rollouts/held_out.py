"""Scoring held-out questions: every row once, in order, none dropped."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from services.contracts import Question, Trajectory, TrajectoryRequest
from services.likelihood.metrics.verdicts import is_right, known_rewards
from services.rollout.pool.pool import RolloutPool
from trainer.loop.rollouts.sampling import seed_of
from trainer.loop.rollouts.scoring import sampled_and_scored
from trainer.rewards import final_answer, make_reward
from trainer.rewards.calls import RewardCalls


def scores_of(
    trajectories: list[Trajectory], rewards: Sequence[float | None], right_at: float
) -> dict[str, Any]:
    """`{"overall": {"em", "f1", "right", "n"}, "sources": {name: the same}}`. rewards: one per trajectory,
    NaN or None where there is none. right: share of those with a reward that earned at least `right_at`."""
    em_of = make_reward("em")
    f1_of = make_reward("f1")
    by_source: dict[str, list[list[float | None]]] = defaultdict(list)
    for t, reward in zip(trajectories, rewards, strict=True):
        by_source[t.question.data_source].append([em_of(t), f1_of(t), reward])

    def mean(rows: list[list[float | None]]) -> dict[str, float]:
        em, f1, rewards = (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [])
        known = np.isfinite(known_rewards(rewards))
        out = {"em": sum(em) / len(rows) if rows else 0.0, "f1": sum(f1) / len(rows) if rows else 0.0}
        if known.any():
            out["right"] = float(is_right(rewards, right_at)[known].mean())
        return out | {"n": len(rows)}

    return {
        "overall": mean([row for rows in by_source.values() for row in rows]),
        "sources": {name: mean(rows) for name, rows in sorted(by_source.items())},
    }


def with_behaviour(scores: dict[str, Any], trajectories: Iterable[Trajectory]) -> dict[str, Any]:
    """`scores_of`, each part with `searches` (mean per question) and `answered` (share of trajectories that
    end with a complete answer): a model that does not write the tags scores 0, and so does one that is
    wrong."""
    by_source: dict[str, list[tuple[int, bool]]] = defaultdict(list)
    for t in trajectories:
        by_source[t.question.data_source].append((t.searches, final_answer(t) is not None))

    def mean(rows: list[tuple[int, bool]]) -> dict[str, float]:
        n = max(1, len(rows))
        return {"searches": sum(r[0] for r in rows) / n, "answered": sum(r[1] for r in rows) / n}

    whole = [row for rows in by_source.values() for row in rows]
    return {
        "overall": scores["overall"] | mean(whole),
        "sources": {name: part | mean(by_source[name]) for name, part in scores["sources"].items()},
    }


async def evaluate(
    pool: RolloutPool,
    questions: list[Question],
    *,
    tag: str,
    temperature: float,
    seed: int,
    calls: RewardCalls | None,
    right_at: float,
    retriever_url: str | None = None,
    on_done: Callable[[Trajectory], None] | None = None,
) -> tuple[dict[str, Any], list[Trajectory]]:
    """One trajectory for each question (temperature 0 is greedy): their `scores_of`, and the trajectories.
    calls: of the reward function, None where it is not there. right_at: the least reward of a right answer
    (`trainer.rewards.right_at`)."""
    requests = []
    for i, question in enumerate(questions):
        uid = f"eval-{tag}-{i:06d}"
        requests.append(TrajectoryRequest(uid, uid, question, seed_of(seed, uid), temperature, retriever_url))
    rewards: Sequence[float | None]
    if calls is None:
        trajectories = await pool.rollout(requests, on_done=on_done)
        rewards = [None] * len(trajectories)
    else:
        trajectories, rewards = await sampled_and_scored(pool, requests, calls, on_done)
    return await asyncio.to_thread(scores_of, trajectories, rewards, right_at), trajectories
