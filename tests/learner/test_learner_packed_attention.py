"""Rows end to end give the same log-probs and gradients as padded rows, and never see one another."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from learner_world import given_old, make_batch, make_config, make_policy, relative_difference, start_rank
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from services.common.errors import UserError
from trainer.learner.batches.micro_batches import Segments, make_microbatch
from trainer.learner.model.attention import attention, flash, takes_grouped
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


def causal_rows(query, key, value, bounds, *, groups):
    """Attention over rows end to end, [T, H, D], by plain matrices."""
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    out = []
    for a, b in pairwise(bounds.tolist()):
        scores = torch.einsum("qhd,khd->hqk", query[a:b], key[a:b]) / query.shape[2] ** 0.5
        future = torch.ones(b - a, b - a, dtype=torch.bool).triu(1)
        out.append(
            torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), value[a:b])
        )
    return torch.cat(out)


class Kernel:
    """In the place of PyTorch's, which needs a GPU: it notes how many key heads it is given."""

    def __init__(self, grouped):
        self.grouped = grouped
        self.heads = []

    def plain(self, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, scale=None):
        self.heads.append(key.shape[1])
        groups = query.shape[1] // key.shape[1]
        if groups > 1 and self.grouped == "refused":
            raise ValueError("Expect query and key/value to have the same number of heads")
        if groups > 1 and self.grouped == "wrong":
            return query * value.mean()
        return causal_rows(query, key, value, cu_seq_q, groups=groups)

    def with_option(self, *given, is_causal=False, scale=None, enable_gqa=False):
        assert enable_gqa == (given[0].shape[1] != given[1].shape[1])
        return self.plain(*given, is_causal=is_causal, scale=scale)


@pytest.mark.parametrize(
    ("grouped", "name", "given"),
    [
        ("taken", "with_option", 2),
        ("taken", "plain", 2),
        ("refused", "plain", 4),
        ("wrong", "plain", 4),
    ],
)
def test_keys_are_repeated_only_for_a_kernel_that_cannot_take_them_as_they_are(
    monkeypatch, grouped, name, given
):
    kernel = Kernel(grouped)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", getattr(kernel, name))
    takes_grouped.cache_clear()
    draw = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, heads, 9, 8, generator=draw) for heads in (4, 2, 2))
    segments = Segments(torch.tensor([0, 4, 9], dtype=torch.int32), 8)
    for _ in range(2):
        out = flash(query, key, value, segments, None)
    takes_grouped.cache_clear()
    rows = [x[0].transpose(0, 1) for x in (query, key, value)]
    expected = causal_rows(*rows, segments.bounds, groups=2).transpose(0, 1)[None]
    assert torch.allclose(out, expected, atol=1e-6)
    assert kernel.heads[-2:] == [given, given], "once tried, it is known"
