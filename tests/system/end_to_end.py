"""Pieces of the end-to-end tests: a small laboratory, and the command line as a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from places import PYTHONPATH, ROOT

ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")} | {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": PYTHONPATH,
    "RAY_ADDRESS": "",
}
"""Of a command as its user has it: a run makes a token of its own."""


def reward(trajectory):
    """A reward with variance on an untrained policy: a number from the tokens that it wrote."""
    return sum(i for a in trajectory.actions for i in a.token_ids) % 7 / 6


def command(*arguments, environment=(), **options):
    """`unspiral ...` as a process of its own. environment: variables beside the usual ones."""
    return subprocess.Popen(
        [sys.executable, "-m", "trainer", *map(str, arguments)],
        cwd=ROOT,
        env=ENVIRONMENT | dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


def finish(process, timeout=240):
    """Exit status and output."""
    try:
        out, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, _ = process.communicate()
        raise AssertionError(f"not done after {timeout} s:\n{out}") from None
    return process.returncode, out


def metrics(run: Path):
    """Whole lines of metrics.jsonl."""
    file = run / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def events(run: Path, kind: str):
    lines = (run / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [e for e in map(json.loads, lines) if e["event"] == kind]


def reproducible(step: dict):
    """A step's metrics without what may differ between two equal runs: times, rates, and the attempt's
    number."""
    return {
        k: v
        for k, v in step.items()
        if not k.startswith("time/") and k not in ("rollout/tokens_per_s", "attempt")
    }


def laboratory(folder: Path):
    """World files and a barely warm-started policy (seconds)."""
    from trainer.lab.demo import EVAL_WORLD, LabFiles, world_files
    from trainer.lab.warm_start import WarmStart, warm_started_model

    model = warm_started_model(WarmStart(steps=3, worlds=1, batch=8, layers=2))
    return LabFiles(model, *world_files(folder, 0), *world_files(folder, EVAL_WORLD))


def configuration(files, folder: Path, name: str, **sections):
    """A YAML file (JSON is YAML) of a run small enough for a test."""
    from trainer.lab.demo import demo_config

    raw = demo_config(files, folder=folder, name=name, seed=0, steps=6)
    raw["rollout"] |= {
        "prompts_per_step": 4,
        "group_size": 3,
        "deterministic": True,
        "max_turns": 1,
        "max_response_tokens": 12,
    }
    raw["learner"] |= {"minibatches_per_batch": 2, "epochs": 2, "lr": 1e-3}
    raw["evaluation"] |= {"limit": 8, "sampled": False}
    raw["reward"] = {"kind": "end_to_end:reward"}
    raw["trainer"] |= {"checkpoint_every": 2, "eval_at_ends": False}
    raw["probe"] = {"lag_steps": 2, "fixed_size": 4}
    for key, values in sections.items():
        raw[key] = raw.get(key, {}) | values
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(raw))
    return file
