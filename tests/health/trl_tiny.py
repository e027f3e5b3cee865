"""A Qwen2 of a few thousand parameters that learns to answer with the word it was asked for, by TRL."""

from __future__ import annotations

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

WORDS = ["<pad>", "<eos>", "say", *"abcdefgh"]
SIZE = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def reward(prompts, completions, **kwargs):
    return [sum(w == p.split()[-1] for w in c.split()) / 6 for p, c in zip(prompts, completions, strict=True)]


def trainer_of(folder, callbacks, **settings):
    """A GRPOTrainer whose generation batch is 32 completions, stepped through in two optimiser steps."""
    plain = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(WORDS), eos_token_id=1, pad_token_id=0, **SIZE))
    usual = {
        "save_strategy": "no",
        "report_to": [],
        "logging_steps": 1,
        "max_steps": 8,
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 2,
        "num_generations": 4,
        "num_iterations": 1,
        "max_completion_length": 6,
        "learning_rate": 2e-2,
        "beta": 0.0,
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
    }
    data = Dataset.from_list([{"prompt": f"say {w}"} for w in "abcdefgh"] * 50)
    return GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(output_dir=str(folder), **(usual | settings)),
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=callbacks,
    )
