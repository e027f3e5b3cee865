"""Sampler and learner in float64 on the CPU: the same tokens have the same log-probs, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from learner_world import make_batch, make_config, make_policy, start_rank
from rollout_models import tiny_model

from services.common.errors import UserError
from services.contracts import TrainBatch
from services.rollout.engines.base import GenerateCall
from services.rollout.engines.transformers_engine import TransformersEngine
from trainer.learner.group import gathered
from trainer.learner.tensor_files import TensorReader

EXACT = {
    "rollout": {"engine": "transformers", "dtype": "float64"},
    "learner": {"dtype": "float64", "zero_stage": 0, "lr": 3e-3},
}
STEPS = 4


@pytest.fixture
def rank(tmp_path):
    tiny_model(tmp_path / "model", tied=True)
    return start_rank(make_config(tmp_path / "model", **EXACT), tmp_path / "model")


async def sampled(engine: TransformersEngine, step: int) -> TrainBatch:
    """Sixteen rows of different lengths, written token by token with the key-value cache."""
    prompts = [[1, *range(4, 5 + i % 7)] for i in range(16)]
    calls = [GenerateCall(str(i), p, 24, 1.0, 100 * step + i, ()) for i, p in enumerate(prompts)]
    made = await engine.generate_batch(calls)
    rows = [p + g.token_ids for p, g in zip(prompts, made, strict=True)]
    logp = [[0.0] * len(p) + g.logprobs for p, g in zip(prompts, made, strict=True)]
    actions = [[-1] * len(p) + [0] * len(g.token_ids) for p, g in zip(prompts, made, strict=True)]
    advantages = np.tile([1.0, -1.0], 8).astype(np.float32)
    return TrainBatch(
        [f"{step}-{i}" for i in range(16)],
        np.cumsum([0, *map(len, rows)]),
        np.concatenate(rows).astype(np.int32),
        np.concatenate(actions).astype(np.int16),
        logp_sampler=np.concatenate(logp).astype(np.float32),
        advantages=advantages,
        preserved=advantages >= 0,
        valid=np.ones(16, bool),
    )


async def test_sampler_and_learner_are_equal_to_the_bit_over_steps_of_training_with_sync(rank, tmp_path):
    engine = await TransformersEngine.start(str(rank.model_path), rank.config.rollout, seed=0)
    means = []
    for step in range(STEPS):
        batch = await sampled(engine, step)
        done = rank.update(batch, llds_lambda=0.2, answer_beta=1.0, lr_scale=1.0)
        learner = gathered(batch, [done.scores]).logp
        of_policy = batch.action_ids >= 0
        assert of_policy.sum() > 150
        assert np.array_equal(learner[of_policy], batch.logp_sampler[of_policy])
        assert len(done.steps) == 4 and not any(s.skipped for s in done.steps)
        means.append(float(learner[of_policy].mean()))
        rank.export_hf(str(tmp_path / f"weights{step}"))
        await engine.load_weights(tmp_path / f"weights{step}", step + 1)
    assert len(set(means)) == STEPS  # the policy moved
    assert {p.dtype for _, p in rank.engine.weights} == {torch.float64}
    await engine.close()


def test_a_checkpoint_keeps_every_bit_of_float64_weights_and_moments(rank, tmp_path):
    def state():
        return [
            (name, weight.clone(), {key: value.clone() for key, value in moments.items()})
            for name, weight, moments in rank.engine.iter_master()
        ]

    for _, p in rank.engine.weights:
        p.grad = torch.full_like(p, 1 / 3)
    rank.engine.step(1e-3)
    before = state()
    rank.save(str(tmp_path / "checkpoint"), {"step": 1})
    for _, p in rank.engine.weights:
        p.data.add_(1.0)
    more_than_float32 = False
    assert rank.load(str(tmp_path / "checkpoint")) == {"step": 1}
    for (name, weight, moments), (_, again, moments_again) in zip(before, state(), strict=True):
        assert torch.equal(weight, again), name
        more_than_float32 |= bool((weight != weight.float().double()).any())
        assert all(torch.equal(moments[key], moments_again[key]) for key in moments), name
    assert more_than_float32


@pytest.mark.parametrize(
    ("dtype", "stage", "master", "snapshot"),
    [
        ("float32", 0, torch.float32, torch.float32),
        ("bfloat16", 1, torch.float32, torch.bfloat16),
        ("float64", 0, torch.float64, torch.float64),
    ],
)
def test_the_types_of_a_checkpoint_are_those_of_the_masters_and_of_the_forward_pass(
    tmp_path, dtype, stage, master, snapshot
):
    model = make_policy(tmp_path)
    llds = {"llds": {"lambda": 0.2, "anchor": "snapshot", "snapshot_every": 3}}
    learner = {"dtype": dtype, "zero_stage": stage}
    rank = start_rank(make_config(model, algorithm=llds, learner=learner), model)
    rank.update(make_batch(seed=3), llds_lambda=0.2, answer_beta=1.0, lr_scale=1.0)
    rank.save(str(tmp_path / "checkpoint"), {})

    def types(folder):
        read = TensorReader(tmp_path / "checkpoint" / folder)
        return {read(name).dtype for name in read.names}

    assert (types("weights"), types("optimizer"), types("snapshot")) == ({master}, {master}, {snapshot})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rollout": {"engine": "vllm", "dtype": "float64"}}, "rollout.dtype=float64 needs .*transformers"),
        ({"learner": {"dtype": "float64", "zero_stage": 1}}, "learner.dtype=float64 needs .*zero_stage=0"),
        ({"learner": {"dtype": "float64", "zero_stage": 0, "ranks": 2}}, "learner.ranks=1"),
        ({"learner": {"dtype": "float64", "zero_stage": 0, "lora": {"rank": 4}}}, "no learner.lora"),
    ],
)
def test_what_float64_does_not_go_with_is_refused_by_name(changed, said, tmp_path):
    with pytest.raises(UserError, match=said):
        make_config(tmp_path, **changed)
