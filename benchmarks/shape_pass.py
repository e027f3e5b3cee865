"""Random weights in the shape of a model, through all of the system: load, sync, rollout, evaluation, resume,
export.

    python -m benchmarks.shape_pass llama3.2-3b OUT                  # true size; needs its memory
    python -m benchmarks.shape_pass llama3.2-3b OUT --reduced        # a quarter of the widths, two layers
    python -m benchmarks.shape_pass llama3.2-3b OUT --layers 1       # true widths, one layer
    python -m benchmarks.shape_pass qwen2.5-3b OUT --at-once rollout.share_gpus=true
    python -m benchmarks.shape_pass qwen2.5-7b OUT --at-once rollout.share_gpus=true learner.lora.rank=16

`KEY=VALUE` arguments go to `unspiral train`. The run is two steps of 16 x 4 trajectories on the demo's
questions; between them it ends and is resumed. The reward is a number from the tokens, since a random model
answers nothing. It prints the seconds of each part, and how far sampler and learner are apart in each step;
the second is sampled with synced weights. OUT/model holds the weights. The disk must hold two
checkpoints beside the weights: 96 GiB at 3B. `--at-once` leaves the resume out, and needs room for one. The
same command again, with the same OUT, goes on after the last part that ended.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from services.common.files import hints, write_json
from services.contracts import Trajectory

QWEN = {"model_type": "qwen2", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 32768}
LLAMA = {
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


def _shape(
    hidden: int, feed_forward: int, layers: int, heads: int, kv_heads: int, vocabulary: int, tied: bool
):
    return {
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": QWEN | _shape(896, 4864, 24, 14, 2, 151936, True),
    "qwen2.5-3b": QWEN | _shape(2048, 11008, 36, 16, 2, 151936, True),
    "qwen2.5-7b": QWEN | _shape(3584, 18944, 28, 28, 4, 152064, False),
    "llama3.2-3b": LLAMA | _shape(3072, 8192, 28, 24, 8, 128256, True),
}
"""As the makers' config.json have them."""
QUARTER = 4
REDUCED_LAYERS = 2
PADDED_TO = 64
"""The reduced vocabulary is a multiple of this: rows that no token has, as the true ones have."""


NOTES_FILE = "passed.json"
UNFINISHED = {"train": ("shape",), "export": ("export",)}
"""What a part that was cut leaves behind and does not take up again; a resume goes on by itself."""


def reduced(shape: dict[str, Any], tokens: int) -> dict[str, Any]:
    """A quarter of the widths, the same heads (of a quarter of their size), two layers, and a vocabulary for
    `tokens`."""
    narrow = {key: shape[key] // QUARTER for key in ("hidden_size", "intermediate_size", "head_dim")}
    return shallow(shape | narrow, tokens, REDUCED_LAYERS)


def shallow(shape: dict[str, Any], tokens: int, layers: int) -> dict[str, Any]:
    """The same widths with `layers` layers and a vocabulary for `tokens`."""
    vocabulary = PADDED_TO * (tokens // PADDED_TO + 1)
    return shape | {"num_hidden_layers": layers, "vocab_size": vocabulary}


def make_model(shape: dict[str, Any], out: Path, *, dtype: str, seed: int = 0) -> int:
    """Random weights of a shape, with the laboratory's tokenizer, as a Hugging Face folder. Returns the
    number of parameters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from trainer.lab.tokenizer import build_tokenizer

    tokenizer = build_tokenizer()
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    settings = {key: value for key, value in shape.items() if key != "model_type"}
    config = AutoConfig.for_model(shape["model_type"], **settings, **ids, initializer_range=0.05)
    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    parameters = sum(p.numel() for p in model.parameters())
    del model
    if device == "cuda":
        torch.cuda.empty_cache()  # this process waits for those that need the memory
    return parameters


def reward(trajectory: Trajectory) -> float:
    """A number with variance on an untrained policy."""
    return sum(i for action in trajectory.actions for i in action.token_ids) % 7 / 6


def configuration(model: Path, out: Path) -> dict[str, Any]:
    """The run: two steps of 64 trajectories."""
    return {
        "run": {"name": "shape", "dir": str(out)},
        "model": {"path": str(model)},
        "data": {"train": "lab:train_questions:0", "eval": "lab:eval_questions:0"},
        "retriever": {"corpus": "lab:train_corpus:0"},
        "rollout": {
            "template": "lab",
            "prompts_per_step": 16,
            "group_size": 4,
            "max_turns": 1,
            "max_response_tokens": 12,
            "max_obs_tokens": 40,
            "max_prompt_tokens": 32,
            "max_model_tokens": 256,
        },
        "reward": {"kind": "benchmarks.shape_pass:reward"},
        "learner": {"lr": 1e-3, "minibatches_per_batch": 2, "tokens_per_microbatch": 4096},
        "evaluation": {"limit": 8},
        "trainer": {"steps": 2, "checkpoint_every": 1, "keep_checkpoints": 1, "eval_at_ends": False},
        "control": {"enabled": False},
    }


def passed(folder: Path, extra: list[str], dtype: str, *, at_once: bool = False) -> dict[str, Any]:
    """Train a step, resume for another (`at_once`: both in one run), export, evaluate the export; seconds of
    each, and what was seen. Parts that OUT/passed.json has are passed over. Raises CalledProcessError where
    a command fails, with its output on the terminal."""
    file = folder / "run.json"
    file.write_text(json.dumps(configuration(folder / "model", folder)), encoding="utf-8")
    run = folder / "shape"
    scores = folder / "scores.json"
    kept = ("--out", scores, "--overwrite")  # of a call that was cut off
    common = ("--config", file, *extra, f"rollout.dtype={dtype}", f"learner.dtype={dtype}")
    first = "trainer.checkpoint_every=2" if at_once else "trainer.steps=1"
    resume = {} if at_once else {"resume": ("train", *common, "--resume", "latest")}
    commands: dict[str, tuple[Any, ...]] = {
        "train": ("train", *common, first),
        **resume,
        "export": ("export", run, folder / "export"),
        "eval": ("eval", *common, f"model.path={folder / 'export'}", "--limit", 8, *kept),
    }
    seconds: dict[str, float] = dict(noted(folder).get("seconds", {}))
    for name, arguments in commands.items():
        if name in seconds:
            print(f"{name}: {seconds[name]} s, in an earlier call", flush=True)
            continue
        for half in UNFINISHED.get(name, ()):
            shutil.rmtree(folder / half, ignore_errors=True)
        began = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "trainer", *map(str, arguments)], check=True, env=_environment()
        )
        seconds[name] = round(time.monotonic() - began, 1)
        print(f"{name}: {seconds[name]} s", flush=True)  # all that is left of a pass that is ended
        note(folder, seconds=seconds)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    gap = [line["mismatch/abs_logp"] for line in lines]
    if [line["step"] for line in lines] != [1, 2] or not all(map(math.isfinite, gap)):
        raise AssertionError(f"expected two steps, each with a finite mismatch: {gap}")
    return {
        "seconds": seconds,
        "mismatch": gap,
        "evaluated": json.loads(scores.read_text(encoding="utf-8"))["overall"]["n"],
    }


def noted(folder: Path) -> dict[str, Any]:
    """What OUT/passed.json says of earlier calls; empty where there was none."""
    return hints(folder / NOTES_FILE)


def note(folder: Path, **values: Any) -> None:
    """Add to OUT/passed.json."""
    write_json(folder / NOTES_FILE, noted(folder) | values)


def _environment() -> dict[str, str]:
    root = str(Path(__file__).parents[1])
    before = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": os.pathsep.join([root, *filter(None, [before])])}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("out", type=Path, help="a new folder, or that of the same pass, cut before")
    smaller = parser.add_mutually_exclusive_group()
    smaller.add_argument(
        "--reduced", action="store_true", help="a quarter of the widths, two layers, float32"
    )
    smaller.add_argument("--layers", type=int, help="true widths, that many layers, a small vocabulary")
    parser.add_argument("--untied", action="store_true", help="an output layer of its own")
    parser.add_argument("--at-once", action="store_true", help="no resume, and one checkpoint on the disk")
    parser.add_argument("--only-model", action="store_true", help="write OUT/model and stop")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for `unspiral train`")
    given = parser.parse_intermixed_args(argv)
    shape = SHAPES[given.shape]
    dtype = "float32" if given.reduced else "bfloat16"
    if given.reduced or given.layers is not None:
        from trainer.lab.tokenizer import build_tokenizer

        tokens = len(build_tokenizer())
        shape = reduced(shape, tokens) if given.reduced else shallow(shape, tokens, given.layers)
    if given.untied:
        shape = shape | {"tie_word_embeddings": False}
    asked = {"shape": shape, "at_once": given.at_once, "overrides": given.overrides}
    given.out.mkdir(parents=True, exist_ok=True)
    before = noted(given.out)
    if before.get("asked", asked) != asked or (not before and any(given.out.iterdir())):
        parser.error(f"{given.out}: holds something else; give a new folder, or the arguments of its pass")
    note(given.out, asked=asked)  # first: a call that is cut in what follows may be made again
    parameters = before.get("parameters") or make_model(shape, given.out / "model", dtype=dtype)
    note(given.out, parameters=parameters)
    found = {"shape": given.shape, "reduced": given.reduced, "tied": shape["tie_word_embeddings"]}
    found["layers"] = shape["num_hidden_layers"]
    found |= {"parameters": parameters, "dtype": dtype}
    if not given.only_model:
        found |= passed(given.out, given.overrides, dtype, at_once=given.at_once)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
