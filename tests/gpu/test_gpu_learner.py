"""The learner on a GPU: packed rows by flash attention against padded rows, and both against float32 on the
CPU."""

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from trainer.learner.batches.micro_batches import make_microbatch
from trainer.learner.model.policy import load_policy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; PyTorch sees none")
VOCABULARY = 4000


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Four layers, 8 heads of 64 on 2 of keys and values."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.05,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    return folder


def batch_of(lengths):
    from services.contracts import TokenBatch

    rng = np.random.default_rng(0)
    actions = np.concatenate([np.where(np.arange(n) < n // 3, -1, 0) for n in lengths]).astype(np.int16)
    tokens = rng.integers(0, VOCABULARY, sum(lengths)).astype(np.int32)
    return TokenBatch([f"t{i}" for i in range(len(lengths))], np.cumsum([0, *lengths]), tokens, actions)


def scored(model, batch, device, dtype, packed, **options):
    """Log-probs, and the gradient of their mean by name."""
    policy = load_policy(model, dtype=dtype, temperature=0.6, chunk_tokens=256, packed=packed, **options).to(
        device
    )
    m = make_microbatch(batch, list(range(len(batch))), torch.device(device), packed=packed)
    p = m.packed
    logp, _ = policy(p.input_ids, *p.at, p.position_ids, p.segments) if packed else policy(m.input_ids, *m.at)
    logp.mean().backward()
    return logp.detach().float().cpu(), {n: q.grad.float().cpu() for n, q in policy.named_weights()}


def apart(a, b):
    return (
        sum(float((a[k] - b[k]).square().sum()) for k in b) ** 0.5
        / sum(float(v.square().sum()) for v in b.values()) ** 0.5
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_checkpointing": True}, {"compiled": True}],
    ids=["plain", "checkpointing", "compiled"],
)
def test_packed_rows_agree_with_padded_rows_in_bfloat16(model, options):
    batch = batch_of([700, 13, 256, 90, 411])
    exact, exact_gradient = scored(model, batch, "cpu", torch.float32, False)
    padded, padded_gradient = scored(model, batch, "cuda", torch.bfloat16, False)
    packed, packed_gradient = scored(model, batch, "cuda", torch.bfloat16, True, **options)
    noise = float((padded - exact).abs().mean())
    assert float((packed - exact).abs().mean()) < 1.5 * noise + 1e-3
    assert float((packed - padded).abs().mean()) < 2 * noise + 1e-3
    assert apart(packed_gradient, exact_gradient) < 1.5 * apart(padded_gradient, exact_gradient) + 1e-3


def test_a_row_is_not_changed_by_its_neighbours(model):
    batch = batch_of([300, 200, 400])
    before, _ = scored(model, batch, "cuda", torch.bfloat16, True)
    batch.token_ids[batch.row(1)] = (batch.token_ids[batch.row(1)] + 17) % VOCABULARY
    after, _ = scored(model, batch, "cuda", torch.bfloat16, True)
    edges = np.cumsum([0, *(n - n // 3 for n in (300, 200, 400))])
    assert torch.equal(before[: edges[1]], after[: edges[1]]) and torch.equal(
        before[edges[2] :], after[edges[2] :]
    )
    assert not torch.equal(before[edges[1] : edges[2]], after[edges[1] : edges[2]])
