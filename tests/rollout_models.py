"""Tiny random models for the rollout tests."""

from __future__ import annotations

from pathlib import Path

import torch
from rollout_fakes import words


def tiny_model(folder: Path, *, tied: bool = True, seed: int = 0, scale: float = 1.0):
    """A random Qwen2 with heads of 32 and a word-level tokenizer, written to `folder`; returns the transformers model."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = words()
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
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
