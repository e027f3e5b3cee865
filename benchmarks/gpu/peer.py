"""A step of ours against a step of TRL's GRPOTrainer with vLLM in the same process: same model, questions,
batch, optimiser steps and GPU.

One generation without a search, since that is what both do: prompts of the template `search_r1`, answers that
end at a closing tag, exact match as reward, GRPO without KL or LLDS, one optimiser step a batch, gradient
checkpointing on both sides or on neither. Both score pi_old (TRL for its correction of vLLM's log-probs).
Weights: ours bfloat16 with fp32 master weights, TRL's float32 under autocast. Sampling and learning share one
GPU in turns; where there are more, both see the first alone. Needs TRL (`pip install trl`). The two run one
after the other, each in processes of its own; `command_seconds` is the whole command, from its start to its
end. With `--vllm no` TRL's answers do not end at tags.

`--reward coin` pays 1 for about half of all answers, by their text, whatever they say: a model that is never
right learns nothing, and then ours leaves the update out. Together with `benchmarks.gpu_searcher --searches 0
--thought 100` it gives answers of a chosen length. `--cold` gives each side empty folders for what vLLM and
PyTorch compile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from services.contracts import Trajectory

ROOT = Path(__file__).resolve().parents[2]
MAX_PROMPT_TOKENS = 512


def arguments(parser: Any) -> None:
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder with corpus.jsonl and train.jsonl")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=32, help="a step")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="of an answer, at most")
    parser.add_argument("--rows", type=int, default=16, help="of a micro-batch of TRL's")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing, on both sides")
    parser.add_argument("--reward", choices=["em", "coin"], default="em")
    parser.add_argument("--cold", action="store_true", help="nothing compiled before is used again")
    parser.add_argument("--only", choices=["ours", "trl"])
    parser.add_argument(
        "--vllm", choices=["yes", "no"], default="yes", help="no: transformers samples on both sides (CPU)"
    )
    parser.add_argument("--set", nargs="*", default=[], help="changes to our configuration")


def run(args: argparse.Namespace) -> dict[str, Any]:
    if (args.prompts * args.group) % args.rows:
        raise SystemExit(
            f"--rows {args.rows} does not divide the {args.prompts * args.group} answers of a step "
            "(--prompts x --group)"
        )
    if args.steps < 2:
        raise SystemExit("--steps must be 2 or more: the first is left out")
    questions = same_questions(args)
    out: dict[str, Any] = {}
    for name in ("ours", "trl"):
        if args.only not in (None, name):
            continue
        with tempfile.TemporaryDirectory(prefix="unspiral-compiled-") as folder:
            environment = one_gpu() | (compiled_in(folder) if args.cold else {})
            began = time.monotonic()
            out[name] = (ours if name == "ours" else peer)(args, questions, environment)
            out[name]["command_seconds"] = time.monotonic() - began
        print(f"{name}: {json.dumps(out[name])}", flush=True)
    return out


def coin(text: str) -> float:
    """1 or 0, each for about half of all texts."""
    return float(zlib.crc32(text.strip().encode()) & 1)


def coin_reward(trajectory: Trajectory) -> float:
    """`coin` as our reward."""
    return coin(trajectory.actions[-1].text)


def same_questions(args: argparse.Namespace) -> Path:
    """A file with the questions that both train on, each once."""
    rows = (args.data / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    if len(rows) < args.prompts * args.steps:
        raise SystemExit(
            f"{args.data / 'train.jsonl'} has {len(rows)} questions, --prompts x --steps are "
            f"{args.prompts * args.steps}"
        )
    file = args.out.resolve() / "peer_train.jsonl"
    file.write_text("".join(rows[: args.prompts * args.steps]), encoding="utf-8")
    return file


def one_gpu() -> dict[str, str]:
    """The environment of either side, with the first GPU alone: TRL would otherwise copy the model to all
    that it sees."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return {"OMP_NUM_THREADS": "1"} | os.environ | {"CUDA_VISIBLE_DEVICES": first}


def compiled_in(folder: str) -> dict[str, str]:
    """Where vLLM and PyTorch keep what they compiled."""
    return {
        "VLLM_CACHE_ROOT": f"{folder}/vllm",
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "TRITON_CACHE_DIR": f"{folder}/triton",
    }


def summary(seconds: list[float], tokens: list[float], rewards: list[float]) -> dict[str, Any]:
    """Without the first step, which compiles and allocates."""
    return {
        "seconds": seconds,
        "seconds_per_step": statistics.median(seconds[1:]),
        "answer_tokens": statistics.mean(tokens[1:]),
        "reward": statistics.mean(rewards),
    }


def our_changes(args: argparse.Namespace, questions: Path) -> dict[str, Any]:
    """To the configuration examples/wiki_qa_gpu.yaml."""
    use_vllm = args.vllm == "yes"
    return {
        "model.path": Path(args.model).resolve(),
        "data.train": questions,
        "data.eval": "null",
        "retriever.corpus": args.data.resolve() / "corpus.jsonl",
        "run.dir": args.out.resolve(),
        "run.name": f"peer_{int(time.time())}",
        "rollout.workers": 1,
        "rollout.engine": "vllm" if use_vllm else "transformers",
        "rollout.share_gpus": str(use_vllm).lower(),
        "rollout.gpu_memory_utilization": 0.4,
        "rollout.prompts_per_step": args.prompts,
        "rollout.group_size": args.group,
        "rollout.max_turns": 0,
        "rollout.max_prompt_tokens": MAX_PROMPT_TOKENS,
        "rollout.max_response_tokens": args.tokens,
        "rollout.max_model_tokens": MAX_PROMPT_TOKENS + args.tokens,
        "algorithm.llds.lambda": 0,
        "reward.kind": "em" if args.reward == "em" else "benchmarks.gpu.peer:coin_reward",
        "learner.minibatches_per_batch": 1,
        "learner.gradient_checkpointing": str(args.checkpointing).lower(),
        "learner.lr": 1e-6,
        "probe.every": 10 * args.steps,  # never
        "trainer.steps": args.steps,
        "trainer.eval_at_ends": "false",
    }


def ours(args: argparse.Namespace, questions: Path, environment: dict[str, str]) -> dict[str, Any]:
    changes = our_changes(args, questions)
    command = [
        "train",
        "--config",
        ROOT / "examples/wiki_qa_gpu.yaml",
        *(f"{k}={v}" for k, v in changes.items()),
        *args.set,
    ]
    subprocess.run(
        [sys.executable, "-m", "trainer", *map(str, command)],
        cwd=ROOT,
        env=environment,
        check=True,
        timeout=900,
    )
    lines = (changes["run.dir"] / changes["run.name"] / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    ended = json.loads((changes["run.dir"] / changes["run.name"] / "summary.json").read_text())
    return summary(
        [s["time/step"] for s in steps],
        [s["rollout/length"] for s in steps],
        [s["reward/mean"] for s in steps],
    ) | {"parts": ended.get("performance", {})}


def peer(args: argparse.Namespace, questions: Path, environment: dict[str, str]) -> dict[str, Any]:
    file = args.out.resolve() / "peer_trl.json"
    told = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    told |= {"out": str(file), "model": str(Path(args.model).resolve()), "questions": str(questions)}
    command = [sys.executable, "-m", "benchmarks.gpu.peer", json.dumps(told)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=900)
    return json.loads(file.read_text())


def _trl(told: dict[str, Any]) -> None:
    """TRL's side, in a process of its own."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from services.rollout.worker.tags import last_answer
    from services.rollout.worker.templates import make_template
    from services.rollout.worker.tokenizer import load_tokenizer
    from services.settings import RolloutSettings
    from trainer.data import load_questions
    from trainer.rewards.answers import exact_match

    gpu = torch.cuda.is_available()
    tokenizer = load_tokenizer(Path(told["model"]))
    # TRL's own tokenizing puts the BOS before it.
    template = make_template("search_r1", tokenizer, RolloutSettings(template="search_r1", bos="none"))
    questions = load_questions(told["questions"]).rows
    rows = [
        {"prompt": tokenizer.decode(template.prompt_ids(q)), "golden": list(q.golden_answers)}
        for q in questions
    ]

    def reward(completions: list[str], golden: list[list[str]], **_: Any) -> list[float]:
        if told["reward"] == "coin":
            return [coin(text) for text in completions]
        found = [last_answer(text) for text in completions]
        return [exact_match(m.content, g) if m else 0.0 for m, g in zip(found, golden, strict=True)]

    batch = told["prompts"] * told["group"]
    use_vllm = told["vllm"] == "yes"
    stops = {"stop": list(template.stop), "include_stop_str_in_output": True}
    config = GRPOConfig(
        output_dir=str(Path(told["out"]).parent / "peer_trl"),
        max_steps=told["steps"],
        per_device_train_batch_size=told["rows"],
        gradient_accumulation_steps=batch // told["rows"],
        num_generations=told["group"],
        max_completion_length=told["tokens"],
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        bf16=gpu,
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=told["checkpointing"],
        use_vllm=use_vllm,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.4,
        vllm_max_model_length=MAX_PROMPT_TOKENS + told["tokens"],
        vllm_enable_sleep_mode=use_vllm and gpu,
        generation_kwargs=stops if use_vllm else None,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=not gpu,
        disable_tqdm=True,
    )
    seconds: list[float] = []

    class Clock(TrainerCallback):
        """Whole steps: TRL's own `step_time` leaves the optimiser's step out."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - self.began)

    dataset = Dataset.from_list(rows)
    trainer = GRPOTrainer(
        told["model"], reward, config, train_dataset=dataset, processing_class=tokenizer, callbacks=[Clock()]
    )
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "step_time" in entry]
    result = summary(seconds, [s["completions/mean_length"] for s in steps], [s["reward"] for s in steps])
    Path(told["out"]).write_text(json.dumps(result))


def table(out: dict[str, Any]) -> str:
    sides = {name: out[name] for name in ("ours", "trl") if name in out}
    lines = [
        f"  {name:5} {r['seconds_per_step']:.2f} s a step, {r['answer_tokens']:.0f} tokens an answer, "
        f"reward {r['reward']:.3f}"
        + (f", {r['command_seconds']:.0f} s in all" if "command_seconds" in r else "")
        for name, r in sides.items()
    ]
    lines += [
        f"  {name}: no reward was earned, so no gradient was computed from one: give a warm-started model"
        for name, r in sides.items()
        if not r["reward"]
    ]
    if "ours" in out and "trl" in out:
        lines.append(
            f"  TRL's step / ours = {out['trl']['seconds_per_step'] / out['ours']['seconds_per_step']:.2f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    _trl(json.loads(sys.argv[1]))
