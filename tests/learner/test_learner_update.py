"""One learner rank in this process: losses, gradients, skipped steps, kept weights."""

from typing import get_args

import numpy as np
import pytest
import torch
from learner_world import (
    TestableRank,
    given_old,
    make_batch,
    make_config,
    make_policy,
    relative_difference,
    same_bits,
    start_rank,
)

import trainer.learner.objective
from trainer.algorithm_names import PolicyLossKind
from trainer.algorithms import LossTerm
from trainer.config.algorithm import AlgorithmSettings
from trainer.learner.batches.micro_batches import make_microbatch
from trainer.learner.objective import Objective, can_act, update_metrics

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning"
)  # of torch, at DeepSpeed's collective operations
STEP = {"llds_lambda": 0.2, "answer_beta": 1.0, "lr_scale": 1.0}
PROBE = {"betas": (0.0, 0.999), "grad_clip": 1e9}  # Adam's first moment is then the gradient
SHARDED = [pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2, 3)]
STAGES = pytest.mark.parametrize("stage", [0, *SHARDED])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_policy(tmp_path_factory.mktemp("policy"))


def plain_scores(model, batch, temperature):
    """Log-probs and entropies of each row alone, by transformers and a softmax over all logits."""
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    logp, entropy = np.zeros(len(batch.token_ids)), np.zeros(len(batch.token_ids))
    for b in range(len(batch)):
        ids = torch.from_numpy(batch.token_ids[batch.row(b)]).long()
        with torch.no_grad():
            table = (hf(input_ids=ids[None]).logits[0].double() / temperature).log_softmax(-1)
        for t in np.flatnonzero(batch.action_ids[batch.row(b)] >= 0):
            at = batch.row(b).start + t
            logp[at], entropy[at] = table[t - 1, ids[t]], -(table[t - 1].exp() * table[t - 1]).sum()
    return logp, entropy


def test_ids_that_the_sampler_can_not_draw_are_out_of_the_softmax(model):
    from transformers import AutoModelForCausalLM

    batch, banned = make_batch(4), [0, 7, 39]
    batch.token_ids[np.isin(batch.token_ids, banned)] = 5
    rank = TestableRank(make_config(model), model_path=str(model), reference=False, rank=0, masked_ids=banned)
    rank.setup("127.0.0.1", rank.host_store("127.0.0.1"))
    logp, hf = in_batch_order(batch, rank.score(batch)), AutoModelForCausalLM.from_pretrained(model)
    for b in range(4):
        ids = torch.from_numpy(batch.token_ids[batch.row(b)]).long()
        with torch.no_grad():
            logits = hf(input_ids=ids[None]).logits[0]
        logits[:, banned] = -torch.inf
        for t in np.flatnonzero(batch.action_ids[batch.row(b)] >= 0):
            assert abs(float(logits.log_softmax(-1)[t - 1, ids[t]]) - logp[batch.row(b).start + t]) < 1e-5


def in_batch_order(batch, scored):
    rows, logp, _ = scored
    out, at = np.zeros(len(batch.token_ids), np.float32), 0
    for b in rows:
        n = batch.row(b).stop - batch.row(b).start
        out[batch.row(b)] = logp[at : at + n]
        at += n
    return out


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("tied", [True, False])
def test_scores_are_those_of_transformers_at_the_sampling_temperature(tmp_path, tied, temperature):
    model, batch = make_policy(tmp_path, tied=tied), make_batch(7, seed=5)
    config = make_config(model, rollout={"temperature": temperature}, learner={"logit_chunk_tokens": 5})
    rank = start_rank(config, model)
    rows, logp, entropy = rank.score(batch)
    place = np.concatenate([np.arange(*batch.row(b).indices(10**9)[:2]) for b in rows])
    expected_logp, expected_entropy = plain_scores(model, batch, temperature)
    assert np.abs(logp - expected_logp[place]).max() < 1e-5
    assert np.abs(entropy - expected_entropy[place]).max() < 1e-5
    assert (logp[batch.action_ids[place] < 0] == 0).all()


@pytest.mark.parametrize(
    ("stage", "loss"),
    [
        *((0, loss) for loss in get_args(PolicyLossKind)),
        *(pytest.param(stage, "grpo", marks=pytest.mark.slow) for stage in (1, 2, 3)),
    ],
)
def test_the_gradient_does_not_depend_on_the_microbatch_size(model, stage, loss):
    batch = given_old(make_batch(8))
    gradients = []
    for tokens in (1, 2 * 24, 4 * 24, 10**6):
        rank = start_rank(
            make_config(
                model,
                algorithm={
                    "loss": loss,
                    "dr_grpo_tokens": 20,
                    "kl": 0.01,
                    "entropy": 0.01,
                    "llds": {"lambda": 0.5},
                },
                learner={**PROBE, "zero_stage": stage, "tokens_per_microbatch": tokens},
            ),
            model,
            reference=True,
        )
        gradients.append(rank.gradient(batch, 0.5))
    assert all(relative_difference(g, gradients[0]) < 1e-5 for g in gradients[1:])
    assert relative_difference(rank.gradient(batch, 0.0), gradients[0]) > 0.01  # LLDS is a visible part of it


@pytest.mark.slow
@STAGES
def test_in_bfloat16_micro_batches_add_up_in_fp32(model, stage):
    batch, gradients = given_old(make_batch(8)), []
    for tokens in (1, 10**6):
        rank = start_rank(
            make_config(
                model,
                learner={**PROBE, "zero_stage": stage, "dtype": "bfloat16", "tokens_per_microbatch": tokens},
            ),
            model,
        )
        gradients.append(rank.gradient(batch, 0.5))
    reference = start_rank(make_config(model, learner=PROBE), model).gradient(batch, 0.5)
    assert relative_difference(gradients[0], gradients[1]) < 0.02
    assert relative_difference(gradients[0], reference) < 0.1


@pytest.mark.parametrize("stage", [1, 3])
def test_gradient_checkpointing_changes_nothing(model, stage):
    batch = given_old(make_batch(8))
    plain, saving = (
        start_rank(
            make_config(model, learner={**PROBE, "zero_stage": stage, "gradient_checkpointing": on}), model
        )
        for on in (False, True)
    )
    assert relative_difference(saving.gradient(batch, 0.5), plain.gradient(batch, 0.5)) < 1e-6


def test_all_zero_stages_end_with_the_same_weights(model):
    batch, weights = make_batch(8), []
    for stage in (0, 1, 2, 3):
        rank = start_rank(make_config(model, learner={"zero_stage": stage, "lr": 1e-4}), model)
        _, steps, *_ = rank.update(batch, **STEP)
        assert not any(s.skipped for s in steps)
        weights.append(rank.weights())
    assert all(w.keys() == weights[0].keys() for w in weights)
    assert all(relative_difference(w, weights[0]) < 1e-6 for w in weights[1:])


def test_hidden_states_that_predict_no_action_get_a_gradient_of_exactly_zero(model):
    batch = given_old(make_batch(6, seed=2))
    rank = start_rank(make_config(model, algorithm={"kl": 0.1, "entropy": 0.1}), model, reference=True)
    m = make_microbatch(batch, list(range(6)), rank.device)
    m.logp_ref = m.logp_old
    seen = {}

    def keep(module, args, output):
        output.last_hidden_state.retain_grad()
        seen["hidden"] = output.last_hidden_state

    handle = rank.engine.policy.hf.base_model.register_forward_hook(keep)
    objective = Objective(rank.algorithm, 0.5)
    terms = objective.terms(*rank._forward(m), m)
    rank.engine.backward(objective.loss(terms, {k: t.count for k, t in terms.items()}))
    handle.remove()
    gradient, predicts = seen["hidden"].grad, torch.zeros(m.action_ids.shape, dtype=torch.bool)
    predicts[:, :-1] = m.action_ids[:, 1:] >= 0
    assert (gradient[~predicts] == 0).all()
    assert (gradient[predicts].abs().sum(-1) > 0).any()


@STAGES
@pytest.mark.parametrize("fault", ["loss", "gradient"])
def test_a_step_that_is_not_finite_is_skipped_and_leaves_no_trace(model, stage, fault):
    config = make_config(model, learner={"zero_stage": stage})
    rank, twin = start_rank(config, model), start_rank(config, model)
    rank.update(make_batch(8, seed=1), **STEP)
    twin.update(make_batch(8, seed=1), **STEP)
    before, batch = rank.master(), make_batch(8)
    if fault == "loss":
        batch.advantages[[0, 5]] = np.nan
        _, steps, *_ = rank.update(batch, **STEP)
    else:
        _, p = rank.engine.weights[3]
        handle = p.register_hook(lambda g: g * torch.inf)
        _, steps, *_ = rank.update(batch, **STEP)
        handle.remove()
    assert [s.skipped for s in steps] == [True] * 4
    metrics = update_metrics(steps, kl=False)
    assert metrics["learner/skipped"] == 4 and metrics["learner/optimiser_steps"] == 0
    assert same_bits(rank.master(), before) and rank.engine.adam_steps == 4 and rank.optimiser_steps == 4

    _, after, *_ = rank.update(make_batch(8, seed=9), **STEP)
    twin.update(make_batch(8, seed=9), **STEP)
    assert not any(s.skipped for s in after)
    assert same_bits(rank.master(), twin.master())


def test_a_fault_in_one_minibatch_skips_that_step_alone(model):
    batch = make_batch(8)
    batch.advantages[6] = np.inf
    _, steps, *_ = start_rank(make_config(model), model).update(batch, **STEP)
    assert [s.skipped for s in steps] == [False, True, False, True]


def test_lambda_0_is_the_update_without_llds_to_the_bit(model, monkeypatch):
    batch = make_batch(8)
    rank = start_rank(make_config(model), model)
    _, steps, *_ = rank.update(batch, **STEP | {"llds_lambda": 0.0})
    assert sum(s.sums["llds/active_tokens"] for s in steps) > 0  # shown, not used
    with_lambda_0 = rank.master()

    nothing = {
        "active_tokens": torch.zeros(()),
        "active_actions": torch.zeros(()),
        "preserved_tokens": torch.zeros(()),
    }
    monkeypatch.setattr(
        trainer.learner.objective,
        "llds_loss",
        lambda *a, **k: LossTerm(torch.zeros(()), torch.zeros(()), nothing),
    )
    absent = start_rank(make_config(model), model)
    absent.update(batch, **STEP | {"llds_lambda": 0.0})
    assert same_bits(absent.master(), with_lambda_0)

    monkeypatch.undo()
    other = start_rank(make_config(model), model)
    other.update(batch, **STEP)
    assert not same_bits(other.master(), with_lambda_0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_llds_acts_on_later_steps_never_on_the_first_and_never_with_unchanged_weights(model, dtype):
    config, batch = make_config(model, learner={"minibatches_per_batch": 4, "dtype": dtype}), make_batch(16)
    _, steps, extra, _ = start_rank(config, model).update(batch, **STEP)
    active = [s.sums["llds/active_tokens"] for s in steps]
    assert active[0] == 0 and sum(active[1:]) > 0 and extra["llds/min_drop"] < 0.1
    assert update_metrics(steps, kl=False)["llds/active_tokens_step_3"] == active[3]

    still = start_rank(config, model)
    before = still.weights()
    _, steps, *_ = still.update(batch, **STEP | {"lr_scale": 0.0})
    assert [s.sums["llds/active_tokens"] for s in steps] == [0] * 8
    assert same_bits(still.weights(), before)


def idle_batch(seed=0):
    """Every group's rewards are equal."""
    batch = make_batch(8, seed=seed)
    batch.advantages[:] = 0
    batch.preserved[:] = True
    return batch


@STAGES
def test_a_batch_in_which_nothing_can_act_takes_no_step_and_leaves_no_trace(model, stage):
    config = make_config(model, learner={"zero_stage": stage, "warmup_steps": 100, "weight_decay": 0.1})
    rank, twin = start_rank(config, model), start_rank(config, model)
    rank.update(make_batch(8, seed=1), **STEP)
    twin.update(make_batch(8, seed=1), **STEP)
    before, batch = rank.master(), idle_batch()
    scored, steps, facts, _ = rank.update(
        batch, **STEP
    )  # LLDS is on, and has no other weights to compare with
    assert steps == [] and "llds/min_drop" not in facts and facts["learner/scored_tokens"] > 0
    assert update_metrics(steps, kl=False) == {"learner/optimiser_steps": 0.0, "learner/skipped": 0.0}
    assert same_bits(rank.master(), before) and rank.optimiser_steps == twin.optimiser_steps == 4
    assert np.abs(in_batch_order(batch, scored) - in_batch_order(batch, rank.score(batch))).max() < 1e-5
    rates = [r.update(make_batch(8, seed=9), **STEP)[2]["lr"] for r in (rank, twin)]
    assert rates[0] == rates[1] and same_bits(rank.master(), twin.master())


@pytest.mark.parametrize(
    ("algorithm", "change", "acts"),
    [
        ({}, {}, False),
        ({}, {"llds_lambda": 0.2}, False),
        ({}, {"llds_lambda": 0.2, "anchored": True}, True),
        ({}, {"anchored": True}, False),
        ({"kl": 0.01}, {}, True),
        ({"entropy": 0.01}, {}, True),
        ({}, {"advantages": [0, 0, 0, 0.5] + [0] * 4}, True),
        ({}, {"advantages": [0, 0, 0, np.nan] + [0] * 4}, True),
        ({"kl": 0.01}, {"valid": [False] * 8}, False),
        ({}, {"advantages": [0.5] + [0] * 7, "valid": [False] + [True] * 7}, False),
        ({}, {"llds_lambda": 0.2, "anchored": True, "preserved": [False] * 8}, False),
    ],
)
def test_what_can_act_in_a_batch(algorithm, change, acts):
    batch = idle_batch()
    for column in ("advantages", "valid", "preserved"):
        if column in change:
            getattr(batch, column)[:] = change[column]
    options = {"llds_lambda": 0.0, "anchored": False} | {
        k: v for k, v in change.items() if k in ("llds_lambda", "anchored")
    }
    assert can_act(AlgorithmSettings(**algorithm), batch, **options) is acts


def test_llds_alone_acts_in_such_a_batch_where_its_anchor_is_older(model):
    llds = {"lambda": 0.2, "anchor": "snapshot", "snapshot_every": 3}
    config = make_config(
        model, algorithm={"llds": llds}, learner={"minibatches_per_batch": 1, "epochs": 1, "lr": 1e-3}
    )
    rank = start_rank(config, model)
    taken = [rank.update(b, **STEP)[1] for b in (make_batch(8), idle_batch(), idle_batch(), idle_batch())]
    assert [len(steps) for steps in taken] == [
        1,
        1,
        1,
        0,
    ]  # the last refreshes the anchor: LLDS compares the same weights
    assert taken[1][0].sums["llds/active_tokens"] > 0


def test_rows_without_a_finite_reward_are_scored_and_train_nothing(model):
    whole = make_batch(8)
    whole.advantages[4:] = np.random.default_rng(1).normal(size=4)
    rows = [0, 1, 3, 4, 6, 7]
    part = whole.take(rows)
    whole.valid[[2, 5]] = False
    whole.advantages[[2, 5]] = np.nan
    config = make_config(model)
    rank, other = start_rank(config, model), start_rank(config, model)
    scored, steps, *_ = rank.update(whole, **STEP)
    _, expected, *_ = other.update(part, **STEP)
    assert same_bits(rank.master(), other.master())
    assert [s.sums for s in steps] == [s.sums for s in expected]
    logp = in_batch_order(whole, scored)
    assert (logp[whole.action_ids >= 0] < 0).all()
    none = make_batch(4)
    none.valid[:] = False
    assert rank.update(none, **STEP)[1] == []


def test_pi_old_is_that_of_the_start_of_the_batch(model):
    batch = make_batch(8)
    rank = start_rank(make_config(model), model)
    before = in_batch_order(batch, rank.score(batch))
    scored, steps, *_ = rank.update(batch, **STEP)
    assert np.abs(in_batch_order(batch, scored) - before).max() < 1e-5
    assert np.abs(in_batch_order(batch, rank.score(batch)) - before).max() > 1e-3
    assert steps[0].ratio_max == 1.0 and steps[1].ratio_max != 1.0


@STAGES
def test_kl_is_measured_against_the_starting_weights_and_leaves_the_current_ones(model, stage):
    rank = start_rank(
        make_config(model, algorithm={"kl": 0.1}, learner={"zero_stage": stage}), model, reference=True
    )
    batch = make_batch(8)
    _, first, *_ = rank.update(batch, **STEP)
    kept = rank.weights()
    [m] = [make_microbatch(batch, list(range(8)), rank.device)]
    rank._score_kept([[m]])
    assert same_bits(rank.weights(), kept)
    expected, _ = plain_scores(model, batch, 1.0)
    mask = m.action_ids >= 0
    assert np.abs(m.unpad(m.logp_ref) - expected).max() < 1e-5 and bool(mask.any())
    assert first[0].sums["kl/loss"] < 1e-6 and first[3].sums["kl/loss"] > 1e-3
    _, second, *_ = rank.update(batch, **STEP)
    assert second[0].sums["kl/loss"] > 1e-3


def test_the_snapshot_is_kept_for_snapshot_every_batches(model):
    config = make_config(
        model,
        algorithm={"llds": {"lambda": 0.2, "anchor": "snapshot", "snapshot_every": 2}},
        learner={"minibatches_per_batch": 1, "epochs": 1, "lr": 1e-3},
    )
    rank = start_rank(config, model)
    batch = make_batch(8)
    active = [rank.update(batch, **STEP)[1][0].sums["llds/active_tokens"] for _ in range(4)]
    assert active[0] == 0 and active[1] > 0 and active[2] == 0 and active[3] > 0


@pytest.mark.parametrize("mode", ["token", "sequence_mask"])
def test_importance_weights_reach_the_policy_term(model, mode):
    batch = make_batch(8)
    rank = start_rank(
        make_config(model, learner=PROBE, algorithm={"importance": {"mode": mode, "cap": 1.2}}), model
    )
    plain = start_rank(make_config(model, learner=PROBE), model)
    batch.logp_old = in_batch_order(batch, plain.score(batch))
    batch.logp_sampler = batch.logp_old.copy()
    assert relative_difference(rank.gradient(batch, 0.0), plain.gradient(batch, 0.0)) < 1e-6
    first = batch.row(0)
    batch.logp_sampler[first] = np.where(batch.action_ids[first] >= 0, batch.logp_old[first] - 2.0, 0.0)
    scaled = plain.gradient(batch, 0.0) if mode == "off" else rank.gradient(batch, 0.0)
    weight = 1.2 if mode == "token" else 0.0
    batch.advantages[0] *= weight
    assert relative_difference(scaled, plain.gradient(batch, 0.0)) < 1e-5


def test_warm_up_and_scale_set_the_learning_rate(model):
    rank = start_rank(make_config(model, learner={"lr": 1e-3, "warmup_steps": 8}), model)
    assert [rank.update(make_batch(8), **STEP)[2]["lr"] for _ in range(3)] == pytest.approx(
        [5e-4, 1e-3, 1e-3]
    )
    assert rank.update(make_batch(8), **STEP | {"lr_scale": 0.5})[2]["lr"] == pytest.approx(5e-4)


@STAGES
def test_bfloat16_trains_with_fp32_master_weights(model, stage):
    rank = start_rank(
        make_config(model, learner={"dtype": "bfloat16", "zero_stage": stage, "lr": 1e-5}), model
    )
    before, seen = rank.master(), rank.weights()
    assert all(t.dtype == torch.bfloat16 for t in seen.values())
    for _ in range(2):
        _, steps, *_ = rank.update(make_batch(8), **STEP)
        assert not any(s.skipped for s in steps) and all(np.isfinite(s.grad_norm) for s in steps)
    after = rank.master()
    name = "model.layers.0.mlp.up_proj.weight"
    moved = (after[name] - before[name]).abs()
    assert after[name].dtype == torch.float32 and 0 < moved.max() < 1e-3
    assert torch.equal(
        after[name].bfloat16(), rank.weights()[name]
    )  # steps too small for bf16 are kept in the master
    assert not torch.equal(after[name], after[name].bfloat16().float())


@pytest.mark.parametrize("token", [40, -5])
def test_a_token_outside_the_vocabulary_is_refused_by_its_id(model, token):
    batch = make_batch(2)
    batch.token_ids[3] = token
    with pytest.raises(ValueError, match=f"token id {token} is outside the model's vocabulary of 40"):
        start_rank(make_config(model), model).score(batch)
