"""The laboratory as files and configurations: the runs of `unspiral demo` and `unspiral demo --collapse`."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.errors import UserError
from services.common.files import written_aside
from services.common.names import nearest
from trainer.data.models import Scheme, cache_dir, register_scheme
from trainer.lab.demonstrations import Library, demonstration
from trainer.lab.warm_start import Progress, WarmStart, warm_started_model
from trainer.lab.world import make_world

TRAIN_WORLD, EVAL_WORLD = 0, 1_000_000
"""Worlds of a seed: trained on is `TRAIN_WORLD + seed`, held out is `EVAL_WORLD + seed`. The warm start's
have negative seeds."""
EVAL_QUESTIONS = 200


FILE_KINDS = ("train_questions", "eval_questions", "train_corpus", "eval_corpus", "train_demonstrations")


@dataclass(frozen=True)
class LabFiles:
    """Everything that a run of the laboratory reads."""

    model: Path
    train_corpus: Path
    train_questions: Path
    eval_corpus: Path
    eval_questions: Path


def lab_model(seed: int, *, fresh: bool = False, progress: Progress | None = None) -> Path:
    """The warm-started policy of a seed (`model.path=lab:SEED`), trained at the first call, then cached."""
    return warm_started_model(WarmStart(seed=seed), fresh=fresh, progress=progress)


def world_files(folder: Path, seed: int) -> tuple[Path, Path]:
    """Corpus and questions of a world, written to `folder` (`world_SEED_corpus.jsonl`,
    `world_SEED_questions.jsonl`)."""
    corpus = folder / f"world_{seed}_corpus.jsonl"
    questions = folder / f"world_{seed}_questions.jsonl"
    if not (corpus.is_file() and questions.is_file()):
        folder.mkdir(parents=True, exist_ok=True)
        world = make_world(seed)
        for write, path in ((world.write_corpus, corpus), (world.write_questions, questions)):
            with written_aside(path) as aside:  # two runs may start at once
                write(aside)
    return corpus, questions


def demonstration_file(folder: Path, seed: int) -> Path:
    """A right demonstration of each question of a world, written to `folder`
    (`world_SEED_demonstrations.jsonl`)."""
    path = folder / f"world_{seed}_demonstrations.jsonl"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        library = Library(make_world(seed))
        rng = random.Random(f"demonstrations-{seed}")
        rows = [demonstration(question, library, "right", rng) for question in library.world.questions]
        with written_aside(path) as aside:
            aside.write_text(
                "".join(json.dumps({"pieces": pieces}) + "\n" for pieces in rows), encoding="utf-8"
            )
    return path


def prepare(folder: Path, seed: int, *, fresh: bool = False, progress: Progress | None = None) -> LabFiles:
    """Worlds into `folder`, warm-started model into the cache."""
    train, held_out = world_files(folder, TRAIN_WORLD + seed), world_files(folder, EVAL_WORLD + seed)
    return LabFiles(lab_model(seed, fresh=fresh, progress=progress), *train, *held_out)


def lab_name(name: str) -> tuple[str, int]:
    """Kind and seed of `lab:KIND:SEED`, a file of the laboratory in a configuration. Raises UserError."""
    kind, _, seed = name.removeprefix("lab:").partition(":")
    if kind not in FILE_KINDS or not seed.isdecimal() or int(seed) >= EVAL_WORLD:
        raise UserError(
            f"{name}: expected lab:KIND:SEED, KIND one of {', '.join(FILE_KINDS)}, SEED a whole number "
            f"below {EVAL_WORLD:,}, "
            f"such as lab:{nearest(kind, FILE_KINDS) or FILE_KINDS[0]}:0"
        )
    return kind, int(seed)


def lab_path(name: str) -> Path:
    """The file of `lab:KIND:SEED`, written to the cache at the first call. Raises UserError."""
    kind, seed = lab_name(name)
    which, what = kind.split("_")
    if what == "demonstrations":
        return demonstration_file(cache_dir() / "lab" / "worlds", TRAIN_WORLD + seed)
    files = world_files(
        cache_dir() / "lab" / "worlds", (TRAIN_WORLD if which == "train" else EVAL_WORLD) + seed
    )
    return files[("corpus", "questions").index(what)]


def _config(files: LabFiles, *, folder: Path, name: str, seed: int) -> dict[str, Any]:
    return {
        "run": {"name": name, "dir": str(folder)},
        "seed": seed,
        "model": {"path": str(files.model)},
        "data": {"train": str(files.train_questions), "eval": str(files.eval_questions)},
        "retriever": {"corpus": str(files.train_corpus)},
        "evaluation": {
            "retriever": {"corpus": str(files.eval_corpus)},
            "limit": EVAL_QUESTIONS,
            "sampled": True,
        },
        "rollout": {
            "template": "lab",
            "prompts_per_step": 16,
            "group_size": 5,
            "max_turns": 3,
            "topk": 2,
            "max_response_tokens": 24,
            "max_obs_tokens": 40,
            "max_prompt_tokens": 32,
            "max_model_tokens": 256,
            "kv_cache_gib": 0.5,
        },
        "learner": {
            "lr": 1e-4,
            "minibatches_per_batch": 4,
            "epochs": 2,
            "tokens_per_microbatch": 4096,
            "zero_stage": 0,
        },
        "algorithm": {"loss": "grpo", "llds": {"lambda": 0.2}},
    }


def demo_config(
    files: LabFiles, *, folder: Path, name: str, seed: int, steps: int | None = None
) -> dict[str, Any]:
    """16 prompts x 5, 8 optimiser steps per batch, lr 1e-4, LLDS-A .2; 12 steps."""
    return _config(files, folder=folder, name=name, seed=seed) | {
        "trainer": {"steps": steps or 12, "checkpoint_every": 0}
    }


def collapse_config(
    files: LabFiles, *, folder: Path, name: str, seed: int, llds_lambda: float, steps: int | None = None
) -> dict[str, Any]:
    """Settings under which plain GRPO falls: lr 3e-4, 8 prompts x 5 in mini-batches of 8, 10 optimiser steps
    a batch; 90 steps. Sampling is seeded: the arms of a seed share the first batch, and a run repeats to the
    bit on one machine."""
    raw = _config(files, folder=folder, name=name, seed=seed)
    raw["rollout"] |= {"prompts_per_step": 8, "deterministic": True}
    raw["learner"] |= {"lr": 3e-4, "minibatches_per_batch": 5, "epochs": 2}
    raw["algorithm"] = {"loss": "grpo", "llds": {"lambda": llds_lambda}}
    raw["evaluation"] |= {"limit": 100}
    return raw | {"trainer": {"steps": steps or 90, "checkpoint_every": 0, "eval_every": 15}}


def named_model(name: str) -> Path:
    """Folder of `lab:SEED`, the warm-started model. Raises UserError."""
    seed = name.removeprefix("lab:")
    if not seed.isdecimal():
        raise UserError(f"model.path {name}: expected lab:SEED with a whole number, such as lab:0")
    return lab_model(int(seed))


register_scheme("lab", Scheme(model=named_model, file=lab_path))
