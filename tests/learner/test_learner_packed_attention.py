"""Rows end to end give the same log-probs and gradients as padded rows, and never see one another."""

import numpy as np
import pytest
import torch
from learner_world import given_old, make_batch, make_config, make_policy, relative_difference, start_rank
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from services.common.errors import UserError
from trainer.learner.batches.micro_batches import make_microbatch
from trainer.learner.model.attention import attention
from trainer.learner.model.policy import load_policy

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
SMALL = {
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
}
CPU = torch.device("cpu")


def family(name, folder):
    torch.manual_seed(0)
    if name == "qwen2":
        return make_policy(folder)
    kind, config = {"qwen3": (Qwen3ForCausalLM, Qwen3Config), "llama": (LlamaForCausalLM, LlamaConfig)}[name]
    make_policy(folder)  # for its tokenizer
    kind(config(**SMALL)).save_pretrained(folder)
    return folder


def loaded(folder, packed, **options):
    return load_policy(
        folder, dtype=torch.float32, temperature=0.8, chunk_tokens=16, packed=packed, **options
    )


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
def test_packed_rows_give_the_log_probs_and_gradients_of_padded_rows(tmp_path, name, checkpointing):
    folder, batch, results = family(name, tmp_path), make_batch(7, seed=2), []
    for packed in (False, True):
        policy = loaded(folder, packed, gradient_checkpointing=checkpointing)
        m = make_microbatch(batch, [3, 0, 6, 1], CPU, packed=packed)
        p = m.packed
        logp, entropy = (
            policy(p.input_ids, *p.at, p.position_ids, p.segments) if packed else policy(m.input_ids, *m.at)
        )
        (logp.square().sum() + entropy.sum()).backward()
        results.append((logp.detach(), entropy.detach(), {n: q.grad for n, q in policy.named_weights()}))
    (logp, entropy, gradient), (packed_logp, packed_entropy, packed_gradient) = results
    assert (logp - packed_logp).abs().max() < 1e-5 and (entropy - packed_entropy).abs().max() < 1e-5
    assert relative_difference(packed_gradient, gradient) < 1e-5


def test_what_stands_in_one_row_changes_no_bit_of_another(tmp_path):
    policy, batch = loaded(make_policy(tmp_path), True), make_batch(4, seed=1)

    def scores():
        m = make_microbatch(batch, [0, 1, 2], CPU, packed=True)
        p = m.packed
        with torch.no_grad():
            return policy(p.input_ids, *p.at, p.position_ids, p.segments)[0], m.at[0]

    before, rows = scores()
    batch.token_ids[batch.row(1)] = (batch.token_ids[batch.row(1)] + 7) % 40
    after, _ = scores()
    assert torch.equal(before[rows != 1], after[rows != 1]) and not torch.equal(
        before[rows == 1], after[rows == 1]
    )


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_packing_learner_takes_the_same_gradient(tmp_path, stage):
    model, batch, gradients = make_policy(tmp_path), given_old(make_batch(8)), []
    for packing, tokens in (("padded", 48), ("packed", 48), ("packed", 10**6)):
        learner = {
            "betas": (0.0, 0.999),
            "grad_clip": 1e9,
            "zero_stage": stage,
            "packing": packing,
            "tokens_per_microbatch": tokens,
        }
        rank = start_rank(make_config(model, learner=learner), model)
        gradients.append(rank.gradient(batch, 0.5))
    assert all(relative_difference(g, gradients[0]) < 1e-5 for g in gradients[1:])


def test_a_packing_learner_scores_and_updates(tmp_path):
    model, batch = make_policy(tmp_path), make_batch(8)
    padded, packed = (
        start_rank(make_config(model, learner={"packing": p}), model) for p in ("padded", "packed")
    )

    def in_order(scored):
        out = np.zeros(len(batch.token_ids), np.float32)
        at = 0
        for b in scored[0]:
            place = batch.row(b)
            out[place] = scored[1][at : at + place.stop - place.start]
            at += place.stop - place.start
        return out

    assert np.abs(in_order(padded.score(batch)) - in_order(packed.score(batch))).max() < 1e-5
    step = {"llds_lambda": 0.2, "answer_beta": 1.0, "lr_scale": 1.0}
    steps = [rank.update(batch, **step)[1] for rank in (padded, packed)]
    assert [s.tokens for s in steps[0]] == [s.tokens for s in steps[1]]
    assert np.allclose([s.grad_norm for s in steps[0]], [s.grad_norm for s in steps[1]], rtol=1e-3)
    assert not any(s.skipped for s in steps[1])


def test_attention_that_is_not_plain_is_refused_by_name():
    x = torch.zeros(1, 2, 4, 8)
    with pytest.raises(UserError, match=r"uses sliding_window.*learner.packing=padded"):
        attention(torch.nn.Identity(), x, x, x, None, sliding_window=2)


def test_compiled_layers_are_traced_once_for_any_number_of_rows(tmp_path):
    """torch.compile gives up on a function after eight traces, and the rest of the run is as slow as
    without."""
    policy = loaded(make_policy(tmp_path), True)
    for layer in policy.hf.base_model.layers:
        layer.compile(dynamic=True, backend="eager")
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]
    before, traced = graphs["unique_graphs"], []
    for n in (3, 2, 4, 5, 6, 7, 8):
        m = make_microbatch(make_batch(n, seed=n), list(range(n)), CPU, packed=True)
        policy(m.packed.input_ids, *m.packed.at, m.packed.position_ids, m.packed.segments)[0].sum().backward()
        traced.append(graphs["unique_graphs"] - before)
    assert 0 < traced[0] <= 4 and set(traced) == {traced[0]}
