"""From prompts to a batch: dynamic sampling, and which answers count as right."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest

from services.contracts import Action, Question, Trajectory
from trainer.config.schema import parse_config
from trainer.data import PromptCursor
from trainer.loop.batches import prepare
from trainer.loop.sampling import BatchSampler, RolloutBatch

RAW = {"model": {"path": "m"}, "data": {"train": "t"}, "retriever": {"url": "http://x"}}
QUESTIONS = [Question(str(i), f"q{i}?", ("a",), "lab") for i in range(40)]


def finished(request, text="<answer> a </answer>"):
    action = Action([5, 6], [-0.5, -0.5], 1, "answer", text)
    return Trajectory(request.uid, request.group, request.question, [1, 2], [action], "answer")


class Pool:
    """Rewards by the question, one for each sample, in the order of the requests."""

    def __init__(self):
        self.groups = []

    async def rollout(self, requests, on_done=None):
        self.groups.append(len({r.group for r in requests}))
        return [finished(r) for r in requests]


def sampled(rewards_of, rounds, size=2, prompts=2):
    rollout = {"prompts_per_step": prompts, "group_size": size}
    config = parse_config(
        {
            **RAW,
            "rollout": rollout,
            "algorithm": {"dynamic_sampling": rounds},
            "data": {"train": "t", "shuffle": False},
        }
    )
    pool = Pool()
    reward = lambda t: rewards_of[int(t.question.id)][int(t.uid[-2:])]  # noqa: E731
    sampler = BatchSampler(config, pool, PromptCursor(QUESTIONS, 0, False), reward)
    return asyncio.run(sampler.sample(3)), pool


def test_dynamic_sampling_replaces_groups_that_teach_nothing_until_the_rounds_are_used_up():
    flat = {0: (1.0, 1.0), 1: (0.0, 1.0), 2: (None, None), 3: (0.5, None), 4: (1.0, 0.0)}
    batch, pool = sampled(flat, rounds=4)
    assert [t.question.id for t in batch.trajectories] == ["1", "1", "4", "4"] and pool.groups == [2, 1, 1, 1]
    assert batch.counts["groups/resampled"] == 3 and batch.cursor["position"] == 5
    assert len({t.uid for t in batch.trajectories}) == 4
    batch, pool = sampled(flat, rounds=1)
    assert [t.question.id for t in batch.trajectories] == ["1", "1", "2", "2"] and pool.groups == [2, 1]
    assert batch.counts == {"groups/resampled": 1, "reward/missing": 2} and np.isnan(batch.rewards[2:]).all()


def test_groups_of_one_have_no_variance_to_lack():
    batch, pool = sampled({0: (1.0,), 1: (1.0,)}, rounds=3, size=1)
    assert pool.groups == [2] and batch.rewards.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("kind", "rewards", "em", "right"),
    [
        ("em", [1.0, 1.0, 0.0, 0.0], [1, 1, 0, 0], [True, True, False, False]),
        (
            "em",
            [0.0, 0.0, -1.0, -1.0],
            [1, 1, 0, 0],
            [True, True, False, False],
        ),  # overlong.penalty 1, at the limit
        (
            "format",
            [0.2, 0.2, 0.8, 1.0],
            [0, 0, 1, 1],
            [False, False, False, True],
        ),  # a group of wrong answers
        ("f1", [0.4, 0.4, 0.0, math.nan], [0, 0, 0, 0], [True, True, False, False]),
    ],
)
def test_right_answers_are_those_that_are_right_whatever_their_form_and_length_earn(kind, rewards, em, right):
    algorithm = {"llds": {"preserve": "right"}}
    config = parse_config({**RAW, "reward": {"kind": kind}, "algorithm": algorithm})
    made = BatchSampler(config, None, None, None)
    trajectories = [
        finished(r) for r in [q for k in range(2) for q in made.requests(1, [QUESTIONS[k]], first=k)[:2]]
    ]
    prepared = prepare(
        RolloutBatch(1, trajectories, np.asarray(rewards), np.asarray(em, float), {}, 1.0), config, None
    )
    assert prepared.right.tolist() == right and prepared.tokens.extra["preserved"].tolist() == right
