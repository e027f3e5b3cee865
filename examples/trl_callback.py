"""Likelihood tracking and LLDS for TRL's GRPOTrainer, run with TRL 1.16.

Needs unspiral-health beside TRL, and a service (`unspiral serve likelihood`).

    callback = LikelihoodCallback("http://127.0.0.1:8100", "my-run", llds=LLDS(0.2))
    trainer = GRPOTrainer(..., callbacks=[callback])
    callback.attach(trainer)
    trainer.train()

The callback scores the batch just before and just after each optimiser step (displacement), and scores the
right answers of five steps ago again (the lag probe, the earliest sign). This costs about two forward
passes per step. Run as a script, it trains a tiny model on CPU, in one process or several:

    python examples/trl_callback.py http://127.0.0.1:8100 [steps]
    torchrun --nproc_per_node 2 examples/trl_callback.py http://127.0.0.1:8100 [steps]
"""

from __future__ import annotations

import sys

import torch

from unspiral_health import LLDS
from unspiral_health.adapters.trl import LikelihoodCallback


def main(url: str, steps: int = 20) -> None:
    """A tiny Qwen2 that learns to answer with the word it was asked for."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    words = ["<pad>", "<eos>", "say", *"abcdefgh"]
    plain = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    torch.manual_seed(0)
    size = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(words), eos_token_id=1, pad_token_id=0, **size))

    def reward(prompts, completions, **kwargs):
        return [
            sum(w == p.split()[-1] for w in c.split()) / 6 for p, c in zip(prompts, completions, strict=True)
        ]

    settings = GRPOConfig(
        output_dir="/tmp/trl-likelihood", save_strategy="no", report_to=[], logging_steps=1,
        max_steps=steps, per_device_train_batch_size=16, gradient_accumulation_steps=1, num_generations=4,
        steps_per_generation=2, num_iterations=1, max_completion_length=6, learning_rate=2e-3, beta=0.0,
        use_cpu=True, bf16=False, disable_tqdm=True,
    )  # fmt: skip
    spool = "/tmp/trl-likelihood/spool"
    callback = LikelihoodCallback(url, "trl", llds=LLDS(0.2), spool_dir=spool, right_at=0.3)
    data = Dataset.from_list([{"prompt": f"say {w}"} for w in "abcdefgh"] * 50)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=settings,
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[callback],
    )
    callback.attach(trainer)
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20)
