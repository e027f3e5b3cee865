"""Advantages of groups, the importance weights, and the small schedules."""

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.likelihood.metrics.verdicts import Verdict, verdicts
from trainer.algorithms import (
    answer_beta,
    group_advantages,
    importance_weights,
    overlong_penalty,
    zero_variance,
)
from trainer.loop.update.batches import advantages_of

KINDS = ("grpo", "dr_grpo", "rloo")
each_kind = pytest.mark.parametrize("kind", KINDS)
quick = settings(max_examples=80, deadline=None, derandomize=True, database=None)
NAN = math.nan


def slow_advantages(rewards: list[float], groups: list, kind: str) -> list[float]:
    out = []
    for r, g in zip(rewards, groups, strict=True):
        born = [x for x, h in zip(rewards, groups, strict=True) if h == g]
        group = [x for x in born if math.isfinite(x)]
        if not math.isfinite(r):
            out.append(0.0)
        elif len(born) == 1:
            out.append(r / (1 + 1e-6) if kind == "grpo" else 0.0)
        elif len(group) < 2 or max(group) == min(group):
            out.append(0.0)
        elif kind == "grpo":
            out.append((r - statistics.fmean(group)) / (statistics.stdev(group) + 1e-6))
        elif kind == "dr_grpo":
            out.append(r - statistics.fmean(group))
        else:
            out.append(r - (sum(group) - r) / (len(group) - 1))
    return out


@each_kind
@quick
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 1.0, 0.5, 0.8, -0.3, NAN, math.inf]), st.sampled_from([7, -2, 10**12, 3])
        ),
        max_size=20,
    )
)
def test_advantages_equal_plain_loops(kind, members):
    rewards, groups = [m[0] for m in members], [m[1] for m in members]
    got = group_advantages(
        torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups, dtype=torch.long), kind
    )
    assert got.tolist() == pytest.approx(slow_advantages(rewards, groups, kind), rel=1e-9, abs=1e-12)


@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("reward", [0.8, 0.1, 1 / 3, 1e6])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_equal_rewards_give_exactly_0(kind, dtype, reward, size):
    rewards = torch.full((size,), reward, dtype=dtype)
    got = group_advantages(rewards, torch.zeros(size, dtype=torch.long), kind)
    assert got.dtype == dtype and (got == 0).all()
    assert zero_variance(rewards, torch.zeros(size, dtype=torch.long)).all()


@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rewards", [(0.1, 0.2, 0.3), (0.3, 0.1, 0.1, 0.2, 0.3, 0.2), (0.8, 0.1, 0.45)])
def test_a_reward_that_is_the_mean_of_its_group_gives_exactly_0(kind, dtype, rewards):
    got = group_advantages(
        torch.tensor(rewards, dtype=dtype), torch.zeros(len(rewards), dtype=torch.long), kind
    )
    middle = sorted(rewards)[len(rewards) // 2]
    assert [a == 0 for a in got.tolist()] == [r == middle for r in rewards]


@each_kind
def test_a_reward_that_is_not_finite_drops_its_trajectory_and_the_rest_is_normalised(kind):
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 3])
    rewards = torch.tensor([1.0, NAN, 0.0, 0.0, 1.0, NAN, NAN, math.inf, NAN])
    got = group_advantages(rewards, groups, kind)
    rest = group_advantages(torch.tensor([1.0, 0.0, 0.0]), torch.zeros(3, dtype=torch.long), kind)
    assert got[[0, 2, 3]].tolist() == rest.tolist()
    assert (got[[1, 4, 5, 6, 7, 8]] == 0).all()
    assert zero_variance(rewards, groups).tolist() == [False] * 4 + [True] * 4 + [False]


def test_a_group_of_one():
    one = (torch.tensor([1.0], dtype=torch.float64), torch.tensor([5]))
    assert group_advantages(*one, "grpo").item() == 1 / (1 + 1e-6)
    assert group_advantages(*one, "dr_grpo").item() == group_advantages(*one, "rloo").item() == 0
    assert not zero_variance(*one).any()


def test_whole_number_rewards_give_float_advantages():
    got = group_advantages(torch.tensor([1, 0]), torch.tensor([0, 0]), "dr_grpo")
    assert got.tolist() == [0.5, -0.5]


def test_advantages_refuse_unknown_kinds_and_shapes():
    with pytest.raises(ValueError, match="unknown advantage 'gae'; known: grpo, dr_grpo, rloo"):
        group_advantages(torch.zeros(2), torch.zeros(2), "gae")
    with pytest.raises(ValueError, match=r"must both be \[B\]"):
        group_advantages(torch.zeros(2), torch.zeros(3), "grpo")


IDS = torch.tensor([[0, 0, -1, 1], [0, -1, -1, -1], [-1, -1, -1, -1]])
OLD = torch.tensor([[-1.0, -2.0, NAN, -1.0], [-1.0, NAN, NAN, NAN], [NAN] * 4], requires_grad=True)


def test_token_weights_are_capped_detached_and_1_outside_the_mask():
    sampler = OLD.detach() - torch.tensor([[0.5, 3.0, 1.0, -200.0], [0.0, 1.0, 1.0, 1.0], [1.0] * 4])
    got = importance_weights(OLD, sampler, IDS, mode="token", cap=2.0)
    assert not got.requires_grad
    assert got.tolist() == [pytest.approx([math.exp(0.5), 2.0, 1.0, 0.0]), [1.0] * 4, [1.0] * 4]
    huge = importance_weights(
        torch.zeros(1, 1), torch.full((1, 1), -1e4), torch.zeros(1, 1, dtype=torch.long), cap=3.0
    )
    assert huge.item() == 3.0


@pytest.mark.parametrize(("gap", "kept"), [(0.69, 1.0), (-0.69, 1.0), (0.70, 0.0), (-0.70, 0.0)])
def test_sequence_mask_drops_a_trajectory_by_its_geometric_mean_ratio(gap, kept):
    sampler = OLD.detach() - torch.tensor([[gap - 1, gap, 9.0, gap + 1], [0.0] * 4, [0.0] * 4])
    got = importance_weights(OLD, sampler, IDS, mode="sequence_mask", cap=2.0)
    assert got.tolist() == [[kept, kept, 1.0, kept], [1.0] * 4, [1.0] * 4] and not got.requires_grad


def test_mode_off_gives_ones_and_bad_calls_are_refused():
    assert (importance_weights(OLD, OLD, IDS, mode="off") == 1).all()
    with pytest.raises(ValueError, match="unknown importance mode 'seq'; known: off, token, sequence_mask"):
        importance_weights(OLD, OLD, IDS, mode="seq")
    with pytest.raises(ValueError, match="cap must be > 1"):
        importance_weights(OLD, OLD, IDS, cap=1.0)


@pytest.mark.parametrize(
    ("schedule", "betas"),  # at 0, 1, 2, 2.5, 3 and 9 valid searches a trajectory
    [("off", [1, 1, 1, 1, 1, 1]), ("paper", [0, 0.5, 1, 1, 1, 1]), ("code", [0, 0, 0.5, 0.75, 1, 1])],
)
def test_answer_weight_schedules(schedule, betas):
    got = [
        answer_beta(schedule, v, llds_lambda=0.2, answer_lambda=0.1) for v in (0.0, 1.0, 2.0, 2.5, 3.0, 9.0)
    ]
    assert got == pytest.approx(betas)


def test_answer_weight_at_its_edges():
    assert answer_beta("code", 2.0, llds_lambda=0.0) == 1.0
    with pytest.raises(ValueError, match="unknown answer weight"):
        answer_beta("linear", 1.0)
    with pytest.raises(ValueError, match="must be finite"):
        answer_beta("paper", NAN)


def test_overlong_penalty_falls_in_a_line_over_the_soft_zone():
    lengths = torch.tensor([0, 80, 81, 90, 100, 101, 10**6])
    got = overlong_penalty(lengths, max_tokens=100, zone_tokens=20, penalty=0.5)
    assert got.tolist() == pytest.approx([0, 0, -0.025, -0.25, -0.5, -0.5, -0.5])
    assert (overlong_penalty(lengths, max_tokens=100, zone_tokens=0) == 0).all()
    with pytest.raises(ValueError, match=r"zone_tokens must lie in 0..max_tokens=100"):
        overlong_penalty(lengths, max_tokens=100, zone_tokens=101)


@each_kind
def test_a_trajectory_lacks_a_verdict_exactly_where_its_reward_is_not_finite(kind):
    """The rows that have left the losses (`TrainBatch.valid`) are those that no likelihood metric counts."""
    rewards = np.array([1, np.nan, 0, np.inf, -np.inf, 1, 1, np.nan, 0.5, np.nan, np.nan, 1e-9])
    groups = ["a", "a", "a", "b", "b", "c", "c", "d", "e", "f", "f", "f"]
    known = verdicts(rewards, advantages_of(rewards, groups, kind)) != Verdict.UNKNOWN
    assert known.tolist() == np.isfinite(rewards).tolist()
