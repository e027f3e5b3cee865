"""A tiny policy and made-up trajectories for the learner's tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from services.contracts import TokenBatch
from trainer.config import Config, parse_config

VOCABULARY = 40


def make_policy(folder: Path, *, tied: bool = True, seed: int = 0) -> Path:
    """Two layers, d 64, heads of 32, weights large enough that log-probs differ."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.15,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCABULARY)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), unk_token="w0").save_pretrained(
        folder
    )
    return folder


def make_batch(rows: int = 8, *, seed: int = 0, group: int = 4) -> TokenBatch:
    """Rows of a prompt, then actions and observations in turn; advantages of either sign, zero in the last group."""
    rng = np.random.default_rng(seed)
    tokens, actions = [], []
    for _ in range(rows):
        ids = [-1] * int(rng.integers(2, 5))
        for a in range(int(rng.integers(1, 4))):
            ids += [a] * int(rng.integers(2, 6)) + [-1] * int(rng.integers(0, 4))
        tokens.append(rng.integers(0, VOCABULARY, len(ids)))
        actions.append(ids)
    flat = np.concatenate([np.asarray(a, np.int16) for a in actions])
    advantages = rng.normal(size=rows).astype(np.float32)
    advantages[rows - group :] = 0.0
    return TokenBatch(
        [f"t{i}" for i in range(rows)],
        np.cumsum([0, *map(len, actions)]),
        np.concatenate(tokens).astype(np.int32),
        flat,
        logp_sampler=np.where(flat >= 0, rng.normal(-3.7, 0.3, len(flat)), 0.0).astype(np.float32),
        extra={"advantages": advantages, "preserved": advantages >= 0, "valid": np.ones(rows, bool)},
    )


def make_config(model: Path, **sections: dict) -> Config:
    raw = {
        "model": {"path": str(model)},
        "data": {"train": "unused.jsonl"},
        "retriever": {"url": "http://127.0.0.1:1"},
        "rollout": {"prompts_per_step": 2, "group_size": 4},
        "algorithm": {"llds": {"lambda": 0.2}},
        "learner": {
            "lr": 1e-3,
            "minibatches_per_batch": 2,
            "epochs": 2,
            "tokens_per_microbatch": 64,
            "start_timeout_seconds": 120,
        },
    }
    for name, values in sections.items():
        raw[name] = {**raw.get(name, {}), **values}
    return parse_config(raw)
