"""The likelihood metrics of a step, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from services.contracts import Action, Observation, Question, TokenBatch, Trajectory
from services.likelihood.metrics.scored_step import ScoredStep
from services.likelihood.metrics.step_metrics import (
    fixed_probe,
    lag_probe,
    leak,
    record_metrics,
    reward_metrics,
    sampler_mismatch,
)
from services.likelihood.records import TrajectoryRecord

QUESTION = Question("q", "who", ("a",), "test")


def scored(batch, logp, rewards, advantages, trajectories, logp_new=None, rescored=None, **more):
    """rescored: the rows that were scored again; None: all."""
    if logp_new is not None and rescored is not None:
        rows = np.repeat(np.isin(np.arange(len(batch)), rescored), np.diff(batch.offsets))
        logp_new = np.where(rows, logp_new, np.nan)
    tokens = replace(batch, logp_old=logp)
    return ScoredStep(trajectories, tokens, rewards, advantages, logp_new=logp_new, **more)


def step_metrics(*what, rollout_seconds=None, **more):
    return scored(*what, **more).metrics(rollout_seconds)


def trajectory_records(trajectories, batch, logp, rewards, advantages, logp_new=None, **more):
    return scored(batch, logp, rewards, advantages, trajectories, logp_new, **more).records()


def trajectory(uid, group, tokens, documents, kind="answer"):
    """One search of tokens[0] tokens, an observation of 2, an answer of tokens[1] tokens; sampler log-probs
    are -.5."""
    first = Action(list(range(tokens[0])), [-0.5] * tokens[0], 0, "search", "s", "q", documents)
    last = Action(list(range(tokens[1])), [-0.5] * tokens[1], 0, kind, "a")
    return Trajectory(uid, group, QUESTION, [7, 7], [first, Observation([9, 9], "o"), last], "answer")


def step():
    """Right (A > 0), wrong with the same documents, wrong with others, and a group without variance."""
    trajectories = [
        trajectory("r", "g1", (1, 3), ["d1", "d2"]),
        trajectory("w1", "g1", (2, 2), ["d2", "d1"]),
        trajectory("w2", "g1", (2, 2), ["d3"]),
        trajectory("u1", "g2", (1, 1), ["d1"], kind="invalid"),
        trajectory("u2", "g2", (1, 1), ["d1"]),
    ]
    batch = TokenBatch.of(trajectories)
    logp = np.full(len(batch.token_ids), np.nan)  # outside the mask anything may stand
    for b, (first, last) in enumerate([(-1.0, -0.1), (-2.0, -0.2), (-3.0, -0.3), (-4.0, -0.4), (-5.0, -0.5)]):
        row = batch.row(b)
        logp[row] = np.where(
            batch.action_ids[row] == 0, first, np.where(batch.action_ids[row] == 1, last, np.nan)
        )
    return trajectories, batch, logp, [1.0, 0.0, 0.0, 1.0, 1.0], np.array([1.0, -0.5, -0.5, 0.0, 0.0])


def test_each_class_is_divided_by_its_own_tokens():
    trajectories, batch, logp, rewards, advantages = step()
    m = step_metrics(batch, logp, rewards, advantages, trajectories)
    assert m["logp/right"] == pytest.approx((-1.0 - 0.3) / 4)
    assert m["logp/wrong"] == pytest.approx((-4.0 - 0.4 - 6.0 - 0.6) / 8)
    assert m["logp/untrained"] == pytest.approx((-4.0 - 0.4 - 5.0 - 0.5) / 4)
    assert m["logp/right_action_0"] == pytest.approx(-1.0) and m["logp/right_action_1"] == pytest.approx(-0.1)
    assert m["logp/wrong_action_1"] == pytest.approx(-0.25)
    assert m["nll/rounds_1"] == pytest.approx((1.3 + 4.4 + 6.6 + 4.4 + 5.5) / 16)


def test_displacement_counts_groups_without_variance_and_leaves_wrong_answers_out():
    trajectories, batch, logp, rewards, advantages = step()
    change = np.zeros_like(logp)
    for b, d in enumerate([(-0.4, 0.05), (-9, -9), (-9, -9), (0.2, 0.1), (-0.1, -0.1)]):
        row = batch.row(b)
        change[row] = np.where(batch.action_ids[row] == 0, d[0], d[1])
    m = step_metrics(batch, logp, rewards, advantages, trajectories, logp_new=logp + change)
    assert m["displacement/mean"] == pytest.approx((-0.4 + 0.15 + 0.3 - 0.2) / 8)
    assert m["displacement/share_negative"] == pytest.approx(2 / 3)
    assert m["displacement/share_negative_actions"] == pytest.approx(3 / 6)
    assert m["displacement/mean_action_0"] == pytest.approx((-0.4 + 0.2 - 0.1) / 3)
    assert m["displacement/share_negative_action_1"] == pytest.approx(1 / 3)
    assert m["displacement/wrong"] == pytest.approx(-9)
    assert m["displacement/p50"] == pytest.approx(-0.25 / 4)
    assert m["displacement/positive"] == pytest.approx((-0.4 + 0.15) / 4)  # advantage > 0 alone
    assert m["displacement/share_negative_positive"] == 1.0
    middle = np.array([-0.4, 0.05, 0.05, 0.05, 0.2, 0.1, -0.1, -0.1])
    d = np.concatenate([middle, np.full(8, -9.0)])
    assert m["kl/old"] == pytest.approx(np.mean(np.exp(d) - d - 1))
    assert m["ratio/p50"] == pytest.approx(np.quantile(np.exp(d), 0.5))
    assert m["ratio/p99"] == pytest.approx(np.quantile(np.exp(d), 0.99))


def test_quantiles_of_wrong_answers_are_over_answers():
    trajectories, batch, logp, rewards, advantages = step()
    m = step_metrics(batch, logp, rewards, advantages, trajectories)
    assert m["logp/wrong_p50"] == pytest.approx((-4.4 / 4 - 6.6 / 4) / 2)
    assert m["logp/wrong_p10"] < m["logp/wrong_p50"] < m["logp/wrong_p90"]
    none = step_metrics(batch, logp, [1.0] * 5, np.zeros(5), trajectories)
    assert "logp/wrong_p50" not in none and "kl/old" not in none


def test_only_the_rows_that_were_scored_again_count():
    trajectories, batch, logp, rewards, advantages = step()
    m = step_metrics(batch, logp, rewards, advantages, trajectories, logp_new=logp - 0.5, rescored=[4])
    assert m["displacement/mean"] == pytest.approx(-0.5) and m["displacement/share_negative"] == 1.0
    assert "displacement/wrong" not in m
    records = trajectory_records(trajectories, batch, logp, rewards, advantages, logp - 0.5, rescored=[4])
    assert records[0]["actions"][0]["logp_after"] is None and records[4]["actions"][0][
        "logp_after"
    ] == pytest.approx(-5.5)


def test_reward_groups_and_retrieval():
    trajectories, batch, logp, rewards, advantages = step()
    m = step_metrics(batch, logp, rewards, advantages, trajectories, rollout_seconds=2.0)
    assert m["reward/mean"] == pytest.approx(0.6) and m["groups/zero_variance"] == 0.5
    assert m["retrieval/wrong_same_documents"] == 0.5
    assert m["rollout/length"] == pytest.approx(16 / 5) and m["rollout/searches"] == 1.0
    assert m["rollout/valid"] == pytest.approx(9 / 10) and m["rollout/finished"] == 1.0
    assert m["rollout/tokens_per_s"] == pytest.approx(8.0)


def test_a_reward_that_is_not_finite_is_left_out():
    trajectories, batch, logp, _, advantages = step()
    m = step_metrics(batch, logp, [1.0, float("nan"), None, 1.0, 1.0], advantages, trajectories)
    assert m["reward/mean"] == 1.0 and m["groups/zero_variance"] == 1.0
    assert (
        reward_metrics(["a", "a", "b", "b", "c"], [1.0, 0.0, None, 1.0, 1.0])["groups/zero_variance"] == 0.5
    )
    assert (
        trajectory_records(trajectories, batch, logp, [1, float("nan"), None, 1, 1], advantages)[1]["reward"]
        is None
    )


def test_a_log_prob_inside_the_mask_that_is_not_finite_is_refused():
    trajectories, batch, logp, rewards, advantages = step()
    logp[batch.row(1)] = np.nan
    with pytest.raises(ValueError, match="w1"):
        trajectory_records(trajectories, batch, logp, rewards, advantages)


def test_records_alone_give_the_same_likelihood_metrics():
    trajectories, batch, logp, rewards, advantages = step()
    whole = step_metrics(batch, logp, rewards, advantages, trajectories, logp_new=logp - 0.1)
    alone = record_metrics(
        [
            TrajectoryRecord(**r)
            for r in trajectory_records(trajectories, batch, logp, rewards, advantages, logp - 0.1)
        ]
    )
    shared = set(whole) - {
        "mismatch/abs_logp",
        "kl/sampler",
        "kl/old",
        "ratio/p1",
        "ratio/p50",
        "ratio/p99",
        "rollout/valid",
        "rollout/finished",
        "rollout/truncated",
        "rollout/at_turn_limit",
        "retrieval/errors",
        "text/non_words",
        "text/repetition",
    }
    assert set(alone) == shared
    assert alone == pytest.approx({k: whole[k] for k in shared})


def test_lag_and_fixed_probe_are_means_over_tokens():
    _, batch, logp, _, _ = step()
    batch.logp_old = logp
    assert lag_probe(batch, logp - 0.25) == pytest.approx(-0.25)
    now = logp.copy()
    now[batch.row(0)] -= 1.0
    assert lag_probe(batch, now) == pytest.approx(-4 / 16) and lag_probe(
        batch, now, rows=[0]
    ) == pytest.approx(-1.0)
    assert lag_probe(batch, now, rows=[]) is None
    assert fixed_probe(batch, logp) == pytest.approx(-(1.3 + 4.4 + 6.6 + 4.4 + 5.5) / 16)


def test_leak_is_zero_when_surprise_equals_entropy_and_seen_otherwise():
    _, batch, logp, _, _ = step()
    inside = batch.action_ids >= 0
    surprise = float(-logp[inside].mean())
    assert leak(batch, logp, surprise) == pytest.approx(0)
    assert leak(batch, logp, np.where(inside, surprise - 0.3, np.nan)) == pytest.approx(0.3)


def test_mismatch_between_sampler_and_learner():
    _, batch, _, _, _ = step()
    m = sampler_mismatch(batch, np.where(batch.action_ids >= 0, -0.4, np.nan))
    assert m["mismatch/abs_logp"] == pytest.approx(0.1, abs=1e-6)
    assert m["kl/sampler"] == pytest.approx(np.exp(0.1) - 1.1, abs=1e-6)


def test_the_mismatch_leaves_out_a_row_without_a_reward():
    trajectories, batch, logp, rewards, advantages = step()
    there = batch.action_ids >= 0
    batch = replace(batch, logp_sampler=np.where(there, logp - 0.5, 7.0).astype(np.float32))
    batch.logp_sampler[batch.row(1)] = -99.0
    rewards[1], advantages[1] = None, 0.0
    m = step_metrics(batch, logp, rewards, advantages, trajectories)
    assert m["mismatch/abs_logp"] == pytest.approx(0.5, abs=1e-5)
    assert m["kl/sampler"] == pytest.approx(np.exp(0.5) - 1.5, abs=1e-5)


def test_a_step_without_trajectories_or_right_ones_gives_no_metric_rather_than_a_wrong_one():
    assert record_metrics([]) == {}
    trajectories, batch, logp, _, _ = step()
    m = step_metrics(batch, logp, [0.0] * 5, np.zeros(5), trajectories)
    assert (
        "logp/right" not in m
        and "retrieval/wrong_same_documents" not in m
        and m["groups/zero_variance"] == 1.0
    )


def test_right_and_wrong_are_what_the_reward_says_not_the_sign_of_the_advantage():
    trajectories, batch, logp, _, _ = step()
    f1 = [0.4, 0.2, 0.0, 0.1, 0.1]  # no exact match: the best of its group is wrong too
    advantages = np.array([1.0, 0.1, -1.1, 0.0, 0.0])
    m = step_metrics(batch, logp, f1, advantages, trajectories)
    assert "logp/right" not in m and m["logp/wrong"] == pytest.approx(
        (-1.0 - 0.3 - 4.0 - 0.4 - 6.0 - 0.6) / 12
    )
    assert "retrieval/wrong_same_documents" in m and m["retrieval/wrong_same_documents"] == 0.0
    said = [True, False, False, None, None]
    m = step_metrics(batch, logp, f1, advantages, trajectories, right=said)
    assert m["logp/right"] == pytest.approx(-1.3 / 4) and m["retrieval/wrong_same_documents"] == 0.5
    records = trajectory_records(trajectories, batch, logp, f1, advantages, right=said)
    alone = record_metrics([TrajectoryRecord(**r) for r in records])
    assert alone["logp/right"] == m["logp/right"] and alone["logp/wrong"] == m["logp/wrong"]


def test_what_has_no_reward_is_in_no_likelihood_metric_and_in_no_share():
    trajectories, batch, logp, _, _ = step()
    rewards, advantages = [1.0, 0.0, 0.0, None, float("nan")], np.array([1.0, -0.5, -0.5, 0.0, 0.0])
    entropy = np.where(batch.action_ids >= 0, 0.7, np.nan)
    all_of_it = dict(rewards=rewards, advantages=advantages, trajectories=trajectories)
    m = step_metrics(batch, logp, **all_of_it, entropy=entropy, logp_new=logp - 0.5)
    rows = [0, 1, 2]
    part = step_metrics(
        batch.take(rows),
        np.concatenate([logp[batch.row(b)] for b in rows]),
        rewards[:3],
        advantages[:3],
        trajectories[:3],
        entropy=np.concatenate([entropy[batch.row(b)] for b in rows]),
        logp_new=np.concatenate([logp[batch.row(b)] for b in rows]) - 0.5,
    )
    assert {k: v for k, v in m.items() if not k.startswith("rollout/")} == pytest.approx(
        {k: v for k, v in part.items() if not k.startswith("rollout/")}
    )
    assert "logp/untrained" not in m and m["displacement/share_negative"] == 1.0 and "nll/rounds_1" in m
    assert m["rollout/length"] == pytest.approx(16 / 5)  # they were sampled all the same
    alone = record_metrics(
        [
            TrajectoryRecord(**r)
            for r in trajectory_records(trajectories, batch, logp, rewards, advantages, logp - 0.5)
        ]
    )
    assert alone["logp/wrong"] == m["logp/wrong"] and "logp/untrained" not in alone
    assert (
        alone["displacement/mean"] == m["displacement/mean"]
        and alone["rollout/length"] == m["rollout/length"]
    )


def test_rows_without_a_reward_do_not_thin_out_the_share_of_falling_answers():
    made = [trajectory(f"t{i}", f"g{i // 2}", (1, 1), ["d"]) for i in range(16)]
    batch = TokenBatch.of(made)
    logp = np.where(batch.action_ids >= 0, -1.0, 0.0)
    change = np.zeros_like(logp)
    for b in range(5):
        change[batch.row(b)] = -0.1
    rewards, advantages = [1.0] * 12 + [None] * 4, np.zeros(16)
    m = step_metrics(batch, logp, rewards, advantages, made, logp_new=logp + change)
    assert m["displacement/share_negative"] == pytest.approx(5 / 12)  # .417, not 5 / 16


def test_without_any_reward_nothing_is_said_of_rewards_and_groups():
    assert reward_metrics(["a", "a", "b", "b"], [None, None, float("nan"), None]) == {}
    partly = reward_metrics(["a", "a", "b", "b"], [None, None, 1.0, 0.0])
    assert partly == {"reward/mean": 0.5, "groups/zero_variance": 0.0}


def test_a_trainer_that_posts_no_rewards_shows_its_better_answers_by_the_advantage():
    trajectories, batch, logp, _, advantages = step()
    records = trajectory_records(trajectories, batch, logp, [None] * 5, advantages, logp - 0.5)
    m = record_metrics([TrajectoryRecord(**r) for r in records])
    assert m["logp/right"] == pytest.approx(-1.3 / 4) and "logp/wrong" in m and "displacement/mean" in m
    assert not {"reward/mean", "groups/zero_variance", "logp/untrained"} & set(m)
