"""The learner's speed and memory on one GPU: packed micro-batches against the plain way, in one process, with
LLDS on and off.

The plain way is a Hugging Face model called as most trainers call it: rows padded to the longest of their
micro-batch in the order in which they came, logits of every position in float32, gradient checkpointing.
Everything else (ZeRO engine, optimiser, losses) is the same code. Weights are random: speed and memory do not
depend on them.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.gpu.shapes import SHAPES, qwen2_config
from services.contracts import TokenBatch, TrainBatch
from trainer.config.schema import Config, parse_config
from trainer.learner import zero
from trainer.learner.batches.micro_batches import MicroBatch, Rows
from trainer.learner.model.policy import PolicyModel, prepare_policy
from trainer.learner.objective import Objective
from trainer.learner.rank import LearnerRank

PLAIN_ROWS = 4
"""Rows of a micro-batch in the plain way."""


class RandomRank(LearnerRank):
    """A learner rank whose model has a shape and random weights, made on the device."""

    hf_config: Any = None
    policy_class: type[PolicyModel] = PolicyModel

    def _load_policy(self) -> PolicyModel:
        from transformers import AutoModelForCausalLM

        from trainer.learner.model import attention as packed_attention

        attention = packed_attention.register() if self.packed else "sdpa"
        with torch.device(self.device):
            hf = AutoModelForCausalLM.from_config(
                self.hf_config, dtype=self.dtype, attn_implementation=attention
            )
        return prepare_policy(self.policy_class, hf, **self._policy_options())


class PlainPolicy(PolicyModel):
    """Logits of all positions at once, as `model(input_ids).logits` gives them."""

    def forward(self, input_ids: Tensor, rows: Tensor, columns: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        hidden = self.hf.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
        logits = nn.functional.linear(hidden, self.hf.get_output_embeddings().weight)
        table = (logits[:, :-1].float() / self.temperature).log_softmax(-1)
        logp = table.gather(-1, input_ids[:, 1:, None])[..., 0][rows, columns - 1]
        return logp, torch.zeros_like(logp)


class PlainRank(RandomRank):
    policy_class = PlainPolicy

    def _deal(self, rows: Rows, batch: TokenBatch) -> list[Rows]:
        return [rows[i : i + PLAIN_ROWS] for i in range(0, len(rows), PLAIN_ROWS)]


def made_up_batch(rows: int, longest: int, vocabulary: int, seed: int = 0) -> TrainBatch:
    """Trajectories of search agents in length and make-up: a prompt, then actions of 20 to 120 tokens with
    observations of 200 to 500."""
    rng = np.random.default_rng(seed)
    tokens, actions = [], []
    for _ in range(rows):
        ids, turn = [-1] * max(2, longest // 12), 0
        for turn in range(int(rng.integers(1, 5))):
            ids += [turn] * int(rng.integers(longest // 100 + 1, longest // 17 + 2))
            ids += [-1] * int(rng.integers(longest // 10 + 1, longest // 4 + 2))
        ids = (ids + [turn + 1] * (longest // 40 + 1))[:longest]
        tokens.append(rng.integers(0, vocabulary, len(ids)))
        actions.append(ids)
    flat = np.concatenate([np.asarray(a, np.int16) for a in actions])
    advantages = rng.normal(size=rows).astype(np.float32)
    return TrainBatch(
        [f"t{i}" for i in range(rows)],
        np.cumsum([0, *map(len, actions)]),
        np.concatenate(tokens).astype(np.int32),
        flat,
        advantages=advantages,
        preserved=advantages >= 0,
        valid=np.ones(rows, bool),
    )


def config_of(model: str, **learner: Any) -> Config:
    return parse_config(
        {
            "model": {"path": model},
            "data": {"train": "unused"},
            "retriever": {"url": "http://unused"},
            "learner": {"minibatches_per_batch": 2, "zero_stage": 2, "lr": 1e-6} | learner,
        }
    )


def timed_step(rank: LearnerRank, micros: list[MicroBatch], llds: float) -> float:
    """Seconds of one optimiser step. pi_old is given, as after scoring."""
    objective = Objective(rank.algorithm, llds)
    [counts] = rank._global_counts([micros], objective)
    if rank.device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    rank._step(micros, objective, counts, 1e-9, on_policy=False)
    if rank.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def measure(rank: LearnerRank, batch: TrainBatch, repeats: int, *, llds_cost: bool) -> dict[str, float]:
    """Seconds of an optimiser step over the whole batch (median), tokens a second, peak memory, and what LLDS
    costs (on and off in turn)."""
    cuda = rank.device.type == "cuda"
    micros: list[MicroBatch] = rank._score_old(batch, rank._deal(list(range(len(batch))), batch))
    timed_step(rank, micros, 0.2)  # warms up
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    times = [timed_step(rank, micros, 0.2) for _ in range(repeats)]
    seconds = statistics.median(times)
    out = {
        "seconds": seconds,
        "spread": (max(times) - min(times)) / seconds,
        "tokens_per_s": len(batch.token_ids) / seconds,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0,
        "microbatches": len(micros),
    }
    if llds_cost:
        pairs = [(timed_step(rank, micros, 0.2), timed_step(rank, micros, 0.0)) for _ in range(repeats + 1)]
        out["llds_cost"] = (
            statistics.median(on for on, _ in pairs) / statistics.median(off for _, off in pairs) - 1
        )
    return out


KEPT = {"gradient_checkpointing": False, "tokens_per_microbatch": 8192}
VARIANTS: dict[str, tuple[type[RandomRank], dict[str, Any]]] = {
    "plain": (PlainRank, {"packing": "padded", "gradient_checkpointing": True}),
    "packed": (RandomRank, {"packing": "packed", "gradient_checkpointing": True}),
    "packed, compiled": (RandomRank, {"packing": "packed", "compile": True, "gradient_checkpointing": True}),
    "compiled, no checkpointing": (
        RandomRank,
        {"packing": "packed", "compile": True, **KEPT},
    ),
    "packed, no checkpointing": (
        RandomRank,
        {"packing": "packed", **KEPT},
    ),
    "compiled, no checkpointing, ZeRO 1": (
        RandomRank,
        {"packing": "packed", "compile": True, "zero_stage": 1, **KEPT},
    ),
    "packed, offload": (
        RandomRank,
        {"packing": "packed", "gradient_checkpointing": True, "offload_optimizer": True, "zero_stage": 1},
    ),
    "packed, LoRA": (RandomRank, {"packing": "packed", "gradient_checkpointing": True, "lora": {"rank": 16}}),
}  # fmt: skip
"""In the order of their worth: where the time runs out, the last ones are left out."""


def run(args: Any) -> dict[str, Any]:
    """Each variant in turn; a variant that fails is reported, and the others go on."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    vocabulary = 256 if args.shape == "tiny" else 151936
    hf_config = qwen2_config(
        args.shape, vocab_size=vocabulary, max_position_embeddings=32768, tie_word_embeddings=True
    )
    batch = made_up_batch(args.rows, args.longest, vocabulary)
    out: dict[str, Any] = {
        "shape": args.shape,
        "rows": args.rows,
        "tokens": len(batch.token_ids),
        "longest": args.longest,
    }
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        _folder_without_weights(Path(folder), hf_config)
        for name in args.variants or VARIANTS:
            if time.monotonic() - began > args.seconds:
                out[name] = {"skipped": "out of time"}
                continue
            kind, learner = VARIANTS[name]
            try:
                out[name] = _variant(
                    name,
                    kind,
                    config_of(folder, **{"tokens_per_microbatch": args.tokens} | learner),
                    hf_config,
                    batch,
                    args,
                )
            except Exception as e:  # whatever it is, those before it have been measured
                out[name] = {"failed": f"{type(e).__name__}: {str(e).splitlines()[0][:160]}"}
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            print(name, json.dumps(out[name]), f"[{time.monotonic() - began:.0f} s]", flush=True)
    zero.leave_distributed()
    if "seconds" in out.get("plain", {}) and "seconds" in out.get("packed", {}):
        for name in VARIANTS:
            if "seconds" in out.get(name, {}):
                out[name]["speedup"] = out["plain"]["seconds"] / out[name]["seconds"]
                out[name]["memory"] = out[name]["peak_gib"] / max(out["plain"]["peak_gib"], 1e-9)
    return out


def _folder_without_weights(folder: Path, hf_config: Any) -> None:
    """The files that make a folder a model; the weights are made on the device."""
    hf_config.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    save_file({}, folder / "model.safetensors")  # whole, since adapters note which weights they belong to


def _variant(
    name: str, kind: type[RandomRank], config: Config, hf_config: Any, batch: TrainBatch, args: Any
) -> dict[str, Any]:
    torch.manual_seed(0)
    rank = kind(config, model_path=config.model.path, reference=False, rank=0)
    rank.hf_config = hf_config
    began = time.monotonic()
    rank.setup("127.0.0.1", rank.host_store("127.0.0.1"))
    setup, began = time.monotonic() - began, time.monotonic()
    try:
        result = {"setup_seconds": setup} | measure(rank, batch, args.repeats, llds_cost=name == "packed")
        return result | {"measure_seconds": time.monotonic() - began}
    finally:
        rank.engine.close()  # also after a failure: the next variant needs the memory


def arguments(parser: Any) -> None:
    parser.add_argument("--shape", choices=sorted(SHAPES), default="3b")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--longest", type=int, default=2048, help="most tokens of a trajectory")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of a packed micro-batch")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=420.0, help="start no variant after so long")
    parser.add_argument("--variants", nargs="*", choices=list(VARIANTS))


def table(out: dict[str, Any]) -> str:
    lines = [f"learner, {out['shape']}, {out['rows']} rows, {out['tokens']:,} tokens a step"]
    lines.append(
        f"{'':36}{'tokens/s':>10}{'x plain':>9}{'peak GiB':>10}{'share':>7}{'spread':>8}{'LLDS cost':>11}"
    )
    for name in VARIANTS:
        r = out.get(name)
        if r is None:
            continue
        if "seconds" not in r:
            lines.append(f"{name:36}{next(iter(r.values()))}")
            continue
        cost = f"{r['llds_cost']:+.2%}" if "llds_cost" in r else ""
        lines.append(
            f"{name:36}{r['tokens_per_s']:10,.0f}{r.get('speedup', 0):9.2f}"
            f"{r['peak_gib']:10.1f}{r.get('memory', 0):7.2f}{r['spread']:8.1%}{cost:>11}"
        )
    return "\n".join(lines)
