"""Likelihood tracking for TRL's GRPOTrainer: one callback. Written for and run with TRL 1.16.

    callback = LikelihoodCallback("http://127.0.0.1:8100", run="my-run")        # unspiral serve likelihood
    callback.trainer = trainer = GRPOTrainer(..., callbacks=[callback])
    trainer.train()

The callback scores the batch just before and just after each optimiser step (displacement), and scores the
right answers of five steps ago again (the lag probe, the earliest sign). This costs about two forward
passes per step. Run as a script, it trains a tiny model on CPU, in one process or several:

    python examples/trl_callback.py http://127.0.0.1:8100 [steps]
    torchrun --nproc_per_node 2 examples/trl_callback.py http://127.0.0.1:8100 [steps]
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import TrainerCallback

from services.likelihood.client import LikelihoodClient
from services.likelihood.metrics.padded import LagMemory, padded_records
from services.likelihood.metrics.verdicts import is_right
from services.likelihood.records import StepRecord

NAMES = {
    "reward": "reward/mean",
    "entropy": "entropy",
    "grad_norm": "grad_norm",
    "kl": "kl/ref",
    "clip_ratio/region_mean": "policy/clip_fraction",
}
KEYS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")


class LikelihoodCallback(TrainerCallback):
    """Posts every optimiser step to a likelihood service. Set `.trainer` once the trainer exists.

    Under `torchrun` or `accelerate launch` each process posts its own rows, through a spool folder of its
    own; metrics come from the first process alone, the lag probe over its rows. right_at: the least reward
    of a right answer.
    """

    client: LikelihoodClient | None = None

    def __init__(
        self,
        url: str,
        run: str,
        spool_dir: str = ".likelihood-spool",
        attempt: int = 0,
        right_at: float = 1.0,
    ):
        self.url = url
        self.run = run
        self.spool_dir = spool_dir
        self.attempt = attempt
        self.right_at = right_at
        self.lag = LagMemory()

    def on_train_begin(self, args, state, control, **kwargs):
        self.rank = args.process_index
        self.client = LikelihoodClient(self.url, spool_dir=f"{self.spool_dir}/rank-{self.rank}")

    @property
    def trainer(self) -> Any:
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        """Keep each completion's reward with it: the trainer drops rewards once it has the advantages."""
        self._trainer = trainer
        scored = trainer._calculate_rewards
        made = trainer._generate_and_score_completions

        def calculate_rewards(*args):
            self.parts = scored(*args)  # [completions of all processes, reward functions], NaN for None
            return self.parts

        def generate_and_score_completions(inputs):
            out = made(inputs)
            rewards = (self.parts * trainer.reward_weights.to(self.parts.device)).nansum(1)
            rewards[self.parts.isnan().all(1)] = torch.nan
            mine = trainer.accelerator.process_index
            return out | {"rewards": rewards.view(-1, len(out["advantages"]))[mine]}

        trainer._calculate_rewards = calculate_rewards
        trainer._generate_and_score_completions = generate_and_score_completions

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.batch = self.joined()
        self.before = self.score(self.batch)

    def on_step_end(self, args, state, control, **kwargs):
        b, mask = self.batch, self.batch["mask"]
        # Without padding, which differs between processes: the samples of one prompt may lie on several.
        prompts = [row[kept.bool()] for row, kept in zip(b["prompt_ids"], b["prompt_mask"], strict=True)]
        groups = [str(hash(tuple(prompt.tolist()))) for prompt in prompts]
        uids = [f"{self.rank}-{row}" for row in range(len(groups))]
        advantages = b["advantages"]
        rewards = b["rewards"]
        right = is_right(rewards.tolist(), self.right_at)
        records = padded_records(
            mask, self.before, advantages, groups,
            after=self.score(b), rewards=rewards, uids=uids, right=right,
        )  # fmt: skip
        lag = self.lag.probe(b, mask, self.before, advantages, self.score, right=right)
        self.post(state.global_step, {} if lag is None else {"probe/lag": lag}, records)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.rank == 0:
            self.post(state.global_step, {NAMES[k]: float(v) for k, v in logs.items() if k in NAMES}, [])

    def on_train_end(self, args, state, control, **kwargs):
        self.client.close()

    def post(self, step: int, metrics: dict, records: list) -> None:
        metrics = metrics if self.rank == 0 else {}
        self.client.post_step(
            self.run,
            StepRecord.model_construct(
                step=step, attempt=self.attempt, policy_version=None, metrics=metrics, trajectories=records
            ),
        )

    def joined(self) -> dict[str, torch.Tensor]:
        """The generation batch that the trainer is stepping through, as one."""
        parts = self.trainer._buffered_inputs
        out = {k: torch.cat([p[k] for p in parts]) for k in (*KEYS, "advantages", "rewards")}
        tools = [p.get("tool_mask") for p in parts]  # 0 on what a tool wrote
        return out | {"mask": out["completion_mask"] * (torch.cat(tools) if tools[0] is not None else 1)}

    @torch.no_grad()
    def score(self, b: dict[str, torch.Tensor]) -> torch.Tensor:
        """Log-probs [B, T] of the completion's tokens at the sampling temperature."""
        model, ids = self.trainer.model, torch.cat([b["prompt_ids"], b["completion_ids"]], 1)
        out = []
        for rows in torch.arange(len(ids)).split(self.trainer.args.per_device_train_batch_size):
            mask = torch.cat([b["prompt_mask"], b["completion_mask"]], 1)[rows]
            logits = model(input_ids=ids[rows], attention_mask=mask).logits[
                :, -b["completion_ids"].size(1) - 1 : -1
            ]
            logp = torch.log_softmax(logits.float() / self.trainer.temperature, -1)
            out.append(logp.gather(-1, b["completion_ids"][rows].unsqueeze(-1)).squeeze(-1))
        return torch.cat(out)


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
    callback = LikelihoodCallback(url, run="trl", spool_dir="/tmp/trl-likelihood/spool", right_at=0.3)
    data = Dataset.from_list([{"prompt": f"say {w}"} for w in "abcdefgh"] * 50)
    callback.trainer = trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=settings,
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[callback],
    )
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20)
