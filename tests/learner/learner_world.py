"""A tiny policy and made-up trajectories for the learner's tests."""

from __future__ import annotations

import os
import time
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cuda" if Path("/dev/nvidiactl").exists() else "cpu")

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from services.contracts import TokenBatch, TrainBatch
from trainer.config.schema import Config, parse_config
from trainer.learner.batches.micro_batches import make_microbatch
from trainer.learner.objective import Objective
from trainer.learner.rank import LearnerRank

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
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), unk_token="w0"
    ).save_pretrained(folder)
    return folder


def make_batch(rows: int = 8, *, seed: int = 0, group: int = 4) -> TrainBatch:
    """Rows of a prompt, then actions and observations in turn; advantages of either sign, zero in the last
    group."""
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
    return TrainBatch(
        [f"t{i}" for i in range(rows)],
        np.cumsum([0, *map(len, actions)]),
        np.concatenate(tokens).astype(np.int32),
        flat,
        logp_sampler=np.where(flat >= 0, rng.normal(-3.7, 0.3, len(flat)), 0.0).astype(np.float32),
        advantages=advantages,
        preserved=advantages >= 0,
        valid=np.ones(rows, bool),
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
            "start_timeout_seconds": 400,
        },
    }
    for name, values in sections.items():
        raw[name] = {**raw.get(name, {}), **values}
    return parse_config(raw)


def given_old(batch: TrainBatch, *, seed: int = 1) -> TrainBatch:
    """The batch with some log-probs as pi_old, far enough from any re-scoring noise that ratios and LLDS's
    gates are fixed."""
    rng = np.random.default_rng(seed)
    batch.logp_old = np.where(
        batch.action_ids >= 0, rng.normal(-3.7, 0.8, len(batch.action_ids)), 0.0
    ).astype(np.float32)
    return batch


class TestableRank(LearnerRank):
    """A rank whose gradient and state a test can ask for."""

    __test__ = False

    def gradient(self, batch: TokenBatch, llds_lambda: float) -> dict[str, torch.Tensor]:
        """The gradient of the whole batch as one optimiser step, against batch.logp_old, from all ranks.
        Needs betas[0] = 0, so that Adam's first moment is the gradient, and a grad_clip that never clips."""
        packs = self._deal(list(range(len(batch))), batch)
        part = [make_microbatch(batch, rows, self.device, packed=self.packed) for rows in packs]
        objective = Objective(self.algorithm, llds_lambda, 1.0)
        if self.algorithm.kl:
            self._score_kept([part])
        [counts] = self._global_counts([part], objective)
        self._step(part, objective, counts, 0.0, on_policy=False)
        return {name: moments["exp_avg"].clone() for name, _, moments in self.engine.iter_master()}

    def master(self) -> dict[str, torch.Tensor]:
        """Weights in fp32, and moments, by name."""
        out = {}
        for name, weight, moments in self.engine.iter_master():
            out[name] = weight.clone()
            out |= {f"{name}.{k}": v.clone() for k, v in moments.items()}
        return out

    def weights(self) -> dict[str, torch.Tensor]:
        """Weights in the compute dtype, by name, gathered in small buckets."""
        return {name: tensor.clone() for name, tensor in self.engine.iter_weights(4096)}

    def nap(self, seconds: float) -> None:
        time.sleep(seconds if self.rank == 1 else 0)

    def break_publisher(self) -> None:
        class Broken:
            def publish(self, tensors, version):
                next(iter(tensors))
                raise ConnectionError("the workers are gone")

        self.publisher = Broken()

    def mend_publisher(self) -> None:
        self.publisher = None


def start_rank(config: Config, model: Path, *, reference: bool = False) -> TestableRank:
    """The only rank of a learner, in this process."""
    rank = TestableRank(config, model_path=str(model), reference=reference, rank=0)
    rank.setup("127.0.0.1", rank.host_store("127.0.0.1"))
    return rank


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def relative_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """|a - b| / |b| over all tensors as one vector."""
    gap = sum(float((a[k].double() - b[k].double()).pow(2).sum()) for k in b)
    return (gap / sum(float(v.double().pow(2).sum()) for v in b.values())) ** 0.5
