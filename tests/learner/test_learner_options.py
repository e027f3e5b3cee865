"""LoRA, host memory for the optimiser, compiled layers."""

import json

import numpy as np
import pytest
import torch
from learner_world import (
    VOCABULARY,
    TestableRank,
    given_old,
    make_batch,
    make_config,
    make_policy,
    relative_difference,
    same_bits,
    start_rank,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from services.common.errors import UserError
from trainer.learner.export import export_checkpoint
from trainer.learner.model.model_identity import weights_digest

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
STEP = {"llds_lambda": 0.2, "answer_beta": 1.0, "lr_scale": 1.0}
LORA = {"lora": {"rank": 4, "alpha": 8}, "lr": 0.02}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_policy(tmp_path_factory.mktemp("policy"))


def logits(folder):
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return hf(input_ids=torch.arange(12)[None]).logits


def test_lora_starts_as_the_base_model_and_gives_workers_merged_weights(model):
    base = load_file(model / "model.safetensors")
    rank = start_rank(make_config(model, learner=LORA), model)
    assert (
        same_bits(rank.weights(), {name: base[name] for name in rank.weights()})
        and rank.weights().keys() == base.keys()
    )
    assert rank.engine.shapes() == [
        (n, tuple(t.shape)) for n, t in rank.engine.iter_weights(2**20)
    ]  # what a sync announces
    trained = sum(p.numel() for _, p in rank.engine.weights)
    assert trained < 0.5 * sum(t.numel() for t in base.values())
    before = rank.score(make_batch(6))[1]
    rank.update(make_batch(8), **STEP)
    after = rank.weights()
    changed = {name for name in base if not torch.equal(after[name], base[name])}
    assert len(changed) == 2 * 7 and all(
        "proj" in name for name in changed
    )  # every linear layer of both, no embedding, no norm
    assert np.abs(rank.score(make_batch(6))[1] - before).max() > 0.01


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.slow
def test_lora_exports_merged_and_checkpoints_hold_the_adapters_alone(model, tmp_path, stage):
    rank = start_rank(make_config(model, learner=LORA | {"zero_stage": stage}), model)
    rank.update(make_batch(8), **STEP)
    rank.save(str(tmp_path / "step_000001"), {"step": 1})
    rank.export_hf(str(tmp_path / "live"))
    export_checkpoint(tmp_path / "step_000001", tmp_path / "exported")
    assert torch.allclose(logits(tmp_path / "live"), logits(tmp_path / "exported"), atol=1e-6)
    assert (logits(tmp_path / "live") - logits(model)).abs().max() > 0.01
    assert all(
        "lora_" in name for name in load_file(tmp_path / "step_000001" / "weights" / "model.safetensors")
    )
    fresh = start_rank(make_config(model, learner=LORA | {"zero_stage": stage}), model)
    assert fresh.load(str(tmp_path / "step_000001")) == {"step": 1}
    assert same_bits(fresh.master(), rank.master()) and same_bits(fresh.weights(), rank.weights())
    about = tmp_path / "step_000001" / "learner.json"
    kept = json.loads(about.read_text())["lora"]
    assert kept.pop("weights") == weights_digest(model)
    assert kept == {"base": str(model.resolve()), "scale": 2.0, "rank": 4, "alpha": 8.0}


def test_a_lora_checkpoint_without_its_base_is_refused_by_name(tmp_path):
    model = make_policy(tmp_path / "base")
    rank = start_rank(make_config(model, learner=LORA), model)
    rank.save(str(tmp_path / "step_000001"), {})
    (model / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"LoRA adapters for the weights in .*base, which are not there"):
        export_checkpoint(tmp_path / "step_000001", tmp_path / "out")


def test_adapters_are_not_taken_on_another_scale_or_beside_other_weights(tmp_path):
    base = make_policy(tmp_path / "base")
    rank = start_rank(make_config(base, learner=LORA), base)
    rank.save(str(tmp_path / "c"), {})
    other = start_rank(make_config(base, learner={"lora": {"rank": 4, "alpha": 64}}), base)
    with pytest.raises(UserError, match=r"learner\.lora\.alpha: .* alpha / rank = 2; here it is 16"):
        other.load(str(tmp_path / "c"))
    with pytest.raises(UserError, match=r"holds LoRA adapters; this learner trains all weights"):
        start_rank(make_config(base), base).load(str(tmp_path / "c"))
    make_policy(base, seed=1)
    with pytest.raises(UserError, match="LoRA adapters for other weights than those that are in"):
        export_checkpoint(tmp_path / "c", tmp_path / "out")


def test_the_kl_of_a_lora_learner_is_to_the_base_model(model):
    config = make_config(model, learner=LORA, algorithm={"kl": 0.01})
    rank = start_rank(config, model, reference=True)
    base = rank.score(make_batch(8))[1]
    rank.update(make_batch(8), **STEP)
    with rank.engine.exchanged(rank.reference_weights):
        assert np.array_equal(rank.score(make_batch(8))[1], base)


def test_lora_targets_that_the_model_lacks_are_named(model):
    with pytest.raises(
        UserError, match=r"learner.lora.targets=\['query'\]: no such linear layer in Qwen2ForCausalLM"
    ):
        start_rank(make_config(model, learner={"lora": {"targets": ["query"]}}), model)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.slow
def test_an_optimiser_in_host_memory_takes_the_same_steps_and_resumes(model, tmp_path, stage, dtype):
    ranks = []
    for offload in (False, True):
        learner = {"zero_stage": stage, "dtype": dtype, "offload_optimizer": offload}
        rank = start_rank(make_config(model, learner=learner), model)
        rank.update(make_batch(8), **STEP)
        ranks.append(rank)
    plain, offloaded = (rank.master() for rank in ranks)
    assert relative_difference(offloaded, plain) < (1e-5 if dtype == "float32" else 1e-2)
    ranks[1].save(str(tmp_path / "step_000001"), {})
    fresh = start_rank(make_config(model, learner=learner), model)
    fresh.load(str(tmp_path / "step_000001"))
    assert same_bits(fresh.master(), offloaded)
    fresh.update(make_batch(8, seed=4), **STEP)
    ranks[1].update(make_batch(8, seed=4), **STEP)
    assert relative_difference(fresh.master(), ranks[1].master()) < 1e-6


@pytest.mark.slow
def test_compiled_layers_give_the_same_gradient(model):
    batch, gradients = given_old(make_batch(8)), []
    for compiled in (False, True):
        learner = {"betas": (0.0, 0.999), "grad_clip": 1e9, "packing": "packed", "compile": compiled}
        rank = start_rank(make_config(model, learner=learner), model)
        gradients.append(rank.gradient(batch, 0.5))
    assert relative_difference(gradients[1], gradients[0]) < 1e-5


@pytest.mark.parametrize(
    ("learner", "line"),
    [
        ({"zero_stage": 3, "lora": {}}, "learner.lora does not work with learner.zero_stage=3"),
        ({"zero_stage": 3, "compile": True}, "learner.compile does not work with learner.zero_stage=3"),
        (
            {"zero_stage": 0, "offload_optimizer": True},
            "learner.offload_optimizer=true needs learner.zero_stage 1, 2 or 3",
        ),
    ],
)
def test_options_that_do_not_fit_together_are_refused_in_one_line(model, learner, line):
    with pytest.raises(UserError, match=line):
        make_config(model, learner=learner)


@pytest.mark.parametrize("tied", [True, False])
def test_the_output_layer_is_counted_apart_tied_or_not(tmp_path, tied):
    """It works on action tokens alone, so the performance table cannot count it with the rest."""
    path = make_policy(tmp_path / "m", tied=tied)
    rank = TestableRank(make_config(path), model_path=str(path), reference=False, rank=0)
    where = rank.setup("127.0.0.1", rank.host_store("127.0.0.1"))
    body = sum(p.numel() for n, p in rank.engine.weights if "embed_tokens" not in n and "lm_head" not in n)
    assert (where.parameters, where.head_parameters) == (body, VOCABULARY * 64)


def test_a_rank_that_was_prepared_takes_the_same_steps(model):
    """With adapters, whose first weights are drawn."""
    config, batch = make_config(model, learner=LORA), given_old(make_batch(5))
    ready = TestableRank(config, model_path=str(model), reference=False, rank=0)
    ready.prepare()
    loaded = ready._loaded
    assert loaded is not None and not hasattr(ready, "engine")
    ready.setup("127.0.0.1", ready.host_store("127.0.0.1"))
    assert ready.engine.policy.hf is loaded.hf and ready._loaded is None, "loaded once"
    plain = start_rank(config, model)
    for rank in (ready, plain):
        rank.update(batch, **STEP)
    assert same_bits(ready.weights(), plain.weights())


def test_a_rank_is_not_prepared_without_a_model(model, tmp_path):
    rank = TestableRank(make_config(model), model_path=str(tmp_path), reference=False, rank=0)
    with pytest.raises(UserError, match=r"learner rank 0 on .*: "):
        rank.prepare()
