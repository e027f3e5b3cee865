"""Tiny random models for the rollout tests."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from rollout_fakes import words


def tiny_model(folder: Path, *, tied: bool = True, seed: int = 0, scale: float = 1.0, **shape: int):
    """A random Qwen2 with heads of 32 and a word-level tokenizer, written to `folder`; returns the
    transformers model. shape: other sizes."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = words()
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        **(sizes | {"num_hidden_layers": 2, "max_position_embeddings": 512} | shape),
        tie_word_embeddings=tied,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config).float()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(0, 0.12 * scale)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.eval()


@torch.no_grad()
def reference_logprobs(model, rows: list[list[int]], temperature: float = 1.0) -> list[list[float]]:
    """Log-prob of each token given those before it, by transformers; the first is 0."""
    out = []
    for row in rows:
        logits = model(torch.tensor([row])).logits[0, :-1].float() / temperature
        out.append([0.0, *logits.log_softmax(-1).gather(1, torch.tensor(row[1:])[:, None])[:, 0].tolist()])
    return out


def bigram_model(
    folder: Path, next_words: dict[str, dict[str, float]], *, seed: int = 0, more: tuple[str, ...] = ()
):
    """A policy whose next word depends on the last one alone: `next_words[word]` are the probabilities;
    written to `folder`.

    A real Qwen2 with one-hot embeddings, whose layers add nothing: logits are a column of the output layer.
    (`seed` adds a little noise; `more` are further words.)
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = words(more=more)
    size, width = len(tokenizer), 96
    assert size <= width
    config = Qwen2Config(
        vocab_size=size,
        hidden_size=width,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=3,
        num_key_value_heads=3,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config).float()
    table = torch.full((size, size), -20.0) + 0.01 * seed * torch.rand(size, size)
    for word, row in next_words.items():
        for following, p in row.items():
            table[tokenizer.convert_tokens_to_ids(following), tokenizer.convert_tokens_to_ids(word)] = (
                math.log(p)
            )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0) if "norm" in name else parameter.zero_()
        model.model.embed_tokens.weight[:, :size] = torch.eye(size)
        model.lm_head.weight[:, :size] = table / width**0.5
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.eval()


def searcher(folder: Path, *, again: float = 0.0, seed: int = 0):
    """A policy that searches for one of `n0 .. n19`, then answers one of `n20 .. n39` (or searches again,
    with probability `again`)."""
    table = {
        "?": {"<search>": 1.0},
        "<search>": {f"n{i}": 0.05 for i in range(20)},
        "<answer>": {f"n{i}": 0.05 for i in range(20, 40)},
    }
    table |= {f"n{i}": {"</search>" if i < 20 else "</answer>": 1.0} for i in range(40)}
    table["</information>"] = {"<answer>": 1 - again} | ({"<search>": again} if again else {})
    return bigram_model(folder, table, seed=seed)
