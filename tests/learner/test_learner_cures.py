"""Cures and controls in one learner rank: gradients whatever the micro-batch, supervised steps, warm-up."""

import numpy as np
import pytest
import torch
from learner_world import (
    given_old,
    make_batch,
    make_config,
    make_policy,
    relative_difference,
    same_bits,
    start_rank,
)

from services.common.errors import UserError
from trainer.config.algorithm import AlgorithmSettings
from trainer.learner.batches.selection import choose_tokens, whole_logp
from trainer.learner.objective import can_act, update_metrics

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch, at DeepSpeed's collectives
STEP = {"llds_lambda": 0.2, "answer_beta": 1.0, "lr_scale": 1.0}
CURES = {
    "nll": {"llds": {"form": "nll"}},
    "random": {"llds": {"gate": "random"}},
    "sapo_search": {"llds": {"form": "sapo_search"}},
    "negatives": {"negatives": 0.5},
    "batch_kl": {"batch_kl": {"weight": 0.5, "over": "preserved"}},
    "clip_cov": {"loss": "clip_cov", "cov_low": 0.1, "cov_share": 0.1},
    "kl_cov": {"loss": "kl_cov", "cov_share": 0.1},
    "token_band": {"importance": {"mode": "token", "token_band": [0.8, 1.25]}},
}
NEUTRAL = {
    "negatives": 1.0,
    "batch_kl": {"weight": 0.0, "over": "preserved"},
    "importance": {
        "geometric_band": [1e-30, 1e30],
        "token_band": [1e-30, 1e30],
        "outlier_band": [1e-30, 1e30],
    },
    "llds": {"lambda": 0.2, "ratio_below": 0.5},
    "supervised": {"every": 0, "rows": 3},
    "cov_share": 0.5,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_policy(tmp_path_factory.mktemp("policy"))


def trained(model, algorithm=None, batch=None, learner=None, **options):
    rank = start_rank(make_config(model, algorithm=algorithm or {}, learner=learner or {}), model)
    update = rank.update(batch if batch is not None else make_batch(8), **STEP | options)
    return rank, update[:3]


@pytest.fixture(scope="module")
def plain(model):
    return trained(model)[0].master()


def test_settings_at_their_neutral_values_change_no_bit(model, plain):
    assert same_bits(trained(model, NEUTRAL)[0].master(), plain)


@pytest.mark.parametrize("name", CURES)
def test_a_cure_changes_the_update_and_not_with_the_micro_batches(model, plain, name):
    batch = make_batch(8)
    batch.logp_sampler = np.where(batch.action_ids >= 0, -3.7, 0.0).astype(np.float32)
    one, _ = trained(model, CURES[name], batch, {"tokens_per_microbatch": 1})
    whole, (_, steps, _) = trained(model, CURES[name], batch, {"tokens_per_microbatch": 10**6})
    assert relative_difference(one.master(), whole.master()) < 1e-5
    assert relative_difference(whole.master(), plain) > 1e-4
    assert not any(s.skipped for s in steps)


def test_the_metrics_of_what_is_on_are_there_and_of_what_is_off_are_absent(model):
    _, (_, steps, _) = trained(model, CURES["batch_kl"])
    assert update_metrics(steps, kl=False)["kl/batch_start"] > 0
    assert steps[0].sums["batch_kl/loss"] == 0 < steps[1].sums["batch_kl/loss"]
    batch = make_batch(8)
    batch.logp_sampler[:] = -50.0
    _, (_, steps, _) = trained(model, CURES["token_band"], batch)
    assert update_metrics(steps, kl=False)["importance/zero_weight"] == 1.0
    _, (_, steps, facts) = trained(model)
    found = update_metrics(steps, kl=False) | facts
    assert {"kl/batch_start", "importance/zero_weight", "supervised/loss"} & found.keys() == set()


def test_the_random_gate_draws_anew_each_step_and_the_same_in_a_repeated_run(model):
    one, (_, steps, _) = trained(model, CURES["random"])
    same, _ = trained(model, CURES["random"])
    assert same_bits(one.master(), same.master())
    assert steps[0].sums["llds/active_tokens"] == 0 < steps[1].sums["llds/active_tokens"]
    assert len({one._seed(i) for i in range(8)}) == 8


def test_the_tokens_of_a_covariance_loss_are_chosen_over_the_whole_step(model):
    batch = given_old(make_batch(8))
    algorithm = AlgorithmSettings(loss="kl_cov", cov_share=0.1)
    rows = [0, 1, 2, 3]
    chosen = choose_tokens(algorithm, batch, batch.logp_old, rows, torch.Generator().manual_seed(0))
    inside = np.concatenate([np.arange(*batch.row(b).indices(10**9)[:2]) for b in rows])
    actions = inside[batch.action_ids[inside] >= 0]
    assert chosen.sum() == int(0.1 * len(actions)) and set(np.flatnonzero(chosen)) <= set(actions)
    rank = start_rank(make_config(model), model)
    micros = rank._score_old(batch, [[1, 0], [3], []])
    logp = whole_logp(batch, micros, rank.device, several_ranks=False)
    expected = rank.score(batch)
    at = 0
    for b in expected.rows:
        n = batch.row(b).stop - batch.row(b).start
        if b in (0, 1, 3):
            assert np.abs(logp[batch.row(b)] - expected.logp[at : at + n]).max() < 1e-5
        at += n


def test_supervised_steps_raise_the_likelihood_of_demonstrations_and_move_an_idle_batch(model):
    idle = make_batch(8)
    idle.advantages[:] = 0
    demonstrations = make_batch(4, seed=7)
    rank, (_, steps, facts) = trained(model, batch=idle, supervised=[demonstrations] * 4)
    assert steps == [] and facts["supervised/steps"] == 4 and rank.optimiser_steps == 0
    before = facts["supervised/loss"]
    mean = -rank.score(demonstrations).logp.sum() / (demonstrations.action_ids >= 0).sum()
    assert mean < before
    first = start_rank(make_config(model), model)
    at_start = -first.score(demonstrations).logp.sum() / (demonstrations.action_ids >= 0).sum()
    _, (_, _, one) = trained(model, batch=idle, supervised=[demonstrations])
    assert one["supervised/loss"] == pytest.approx(at_start, rel=1e-5)


def test_supervised_steps_come_after_the_batch_and_do_not_depend_on_micro_batches(model, plain):
    demonstrations = [make_batch(4, seed=7)]
    one, _ = trained(model, learner={"tokens_per_microbatch": 1}, supervised=demonstrations)
    whole, (_, steps, _) = trained(model, learner={"tokens_per_microbatch": 10**6}, supervised=demonstrations)
    assert len(steps) == 4 and relative_difference(one.master(), whole.master()) < 1e-5
    assert relative_difference(whole.master(), plain) > 1e-4


def test_warm_up_by_batches_gives_all_steps_of_a_batch_one_rate(model):
    rank = start_rank(make_config(model, learner={"lr": 1e-3, "warmup_batches": 4}), model)
    rates = [rank.update(make_batch(8), **STEP)[2]["lr"] for _ in range(5)]
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3]) and rank.optimiser_steps == 20


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learner": {"warmup_steps": 2, "warmup_batches": 2}}, "two units of one warm-up"),
        ({"algorithm": {"importance": {"token_band": [1.5, 2]}}}, r"token_band=\[1.5, 2\]: expected \[low"),
        ({"algorithm": {"supervised": {"every": 2}}}, "every > 0 needs data"),
        ({"algorithm": {"cov_low": 5.0}}, "cov_low=5 must be below cov_high=5"),
        (
            {"algorithm": {"llds": {"lambda": 0.0}, "batch_kl": {"weight": 0.1}}, "learner": {"epochs": 1}},
            "batch_kl.weight > 0 can never act",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(model, settings, message):
    if "batch_kl" in settings.get("algorithm", {}):
        settings["learner"] |= {"minibatches_per_batch": 1}
    with pytest.raises(UserError, match=message):
        make_config(model, **settings)


def test_nll_acts_in_a_batch_in_which_nothing_else_can_and_with_one_optimiser_step(model):
    batch = make_batch(8)
    batch.advantages[:] = 0
    nll = AlgorithmSettings(llds={"form": "nll"})
    assert can_act(nll, batch, llds_lambda=0.2, anchored=False)
    assert not can_act(nll, batch, llds_lambda=0.0, anchored=False)
    assert not can_act(AlgorithmSettings(batch_kl={"weight": 1.0}), batch, llds_lambda=0.0, anchored=False)
    batch.advantages[:] = -1.0
    assert not can_act(AlgorithmSettings(negatives=0.0), batch, llds_lambda=0.0, anchored=False)
    make_config(model, algorithm={"llds": {"form": "nll"}}, learner={"minibatches_per_batch": 1, "epochs": 1})
