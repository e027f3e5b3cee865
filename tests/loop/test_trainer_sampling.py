"""From prompts to a batch: dynamic sampling, and which answers count as right."""

from __future__ import annotations

import asyncio
import math
import time

import numpy as np
import pytest
from rollout_fakes import words

from services.common.errors import UserError
from services.contracts import Action, Question, Trajectory
from trainer.config.schema import parse_config
from trainer.data import PromptCursor
from trainer.loop.rollouts.sampling import BatchSampler
from trainer.loop.update.batches import prepare

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


def sampled(rewards_of, rounds, size=2, prompts=2, reward=None):
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
    reward = reward or (lambda t: rewards_of[int(t.question.id)][int(t.uid[-2:])])
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
    assert np.isnan(batch.rewards[2:]).all()
    assert batch.counts.pop("time/reward") > 0
    assert batch.counts == {"groups/resampled": 1, "reward/missing": 2}


def test_the_seconds_of_scoring_are_those_of_all_rounds_and_a_part_of_the_sampling():
    spent = []

    def slow(trajectory):
        began = time.monotonic()
        value = sum(range(20_000)) % 2 + int(trajectory.uid[-1]) * (trajectory.question.id != "0")
        spent.append(time.monotonic() - began)
        return float(value)

    batch, pool = sampled({}, rounds=4, reward=slow)
    assert len(pool.groups) == 2 and len(spent) == 6
    assert sum(spent) <= batch.counts["time/reward"] <= batch.seconds


def test_groups_of_one_have_no_variance_to_lack():
    batch, pool = sampled({0: (1.0,), 1: (1.0,)}, rounds=3, size=1)
    assert pool.groups == [2] and batch.rewards.tolist() == [1.0, 1.0]


def scored_by(function, per_question=2, **sections):
    """A batch of two groups of `per_question`, scored by a reward function, and what the learner is given of
    it."""
    rollout = {"prompts_per_step": 2, "group_size": per_question, "max_response_tokens": 4, "max_turns": 0}
    config = parse_config({**RAW, "rollout": rollout, "data": {"train": "t", "shuffle": False}} | sections)
    batch = asyncio.run(BatchSampler(config, Pool(), PromptCursor(QUESTIONS, 0, False), function).sample(1))
    return batch, prepare(batch, config, words())


def by_place(*values):
    """Rewards in the order of the trajectories of two groups of two."""
    return lambda t: values[2 * int(t.question.id) + int(t.uid[-2:])]


RIGHT_ONLY = {"algorithm": {"llds": {"preserve": "right"}}}


def test_the_best_reward_is_right_and_part_of_it_is_not():
    batch, prepared = scored_by(by_place(0.4, 0.2, 1.0, None), **RIGHT_ONLY)
    assert batch.right.tolist() == [False, False, True, False]
    assert prepared.right == [False, False, True, None]
    tokens = prepared.tokens
    assert tokens.right.tolist() == tokens.preserved.tolist() == [False, False, True, False]


def test_the_tag_tokens_of_the_batch_are_marked_for_the_metrics():
    _, prepared = scored_by(by_place(1.0, 0.0, 1.0, 0.0))
    assert words().convert_ids_to_tokens([5, 6]) == ["</think>", "<search>"]
    assert prepared.control.tolist() == [False, False, True, True] * 4  # a prompt of two tokens, then those


def test_a_shaped_reward_without_any_exact_match_makes_no_answer_right():
    batch, prepared = scored_by(lambda t: 0.1, per_question=10, **RIGHT_ONLY)
    assert len(batch.right) == 20 and not batch.right.any()
    assert not prepared.tokens.preserved.any()


def test_the_threshold_of_the_settings_and_that_of_the_function_say_what_is_right():
    values = by_place(7.0, 10.0, 3.0, 9.0)
    assert scored_by(values, reward={"right_at": 9})[0].right.tolist() == [False, True, False, True]
    values.right_at = 7
    assert scored_by(values)[0].right.tolist() == [True, True, False, True]
    assert scored_by(values, reward={"right_at": 10})[0].right.tolist() == [False, True, False, False]


def test_a_right_answer_stays_right_whatever_its_length_costs():
    # 2 tokens of a limit of 4, in a soft zone of 4: half of the penalty
    overlong = {"algorithm": {"overlong": {"tokens": 4, "penalty": 1.0}}}
    batch, prepared = scored_by(by_place(1.0, 0.0, 1.0, 1.0), **overlong)
    assert batch.rewards.tolist() == [0.5, -0.5, 0.5, 0.5] and batch.right.tolist() == [
        True,
        False,
        True,
        True,
    ]
    assert prepared.tokens.preserved.tolist() == [True, False, True, True]


def test_ten_tenths_are_one():
    assert scored_by(lambda t: sum([0.1] * 10))[0].right.all()


@pytest.mark.parametrize("said", ["high", math.nan, True])
def test_a_threshold_of_a_reward_function_that_is_no_number_is_refused(said):
    def reward(trajectory):
        return 1.0

    reward.right_at = said
    with pytest.raises(
        UserError, match=r"attribute right_at of the reward function is .*; expected a number"
    ):
        scored_by(reward)
