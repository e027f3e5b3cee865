"""The design: arms, seeds, settings. PLAN.md shows the same; a test holds it to this module."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from benchmarks.barometer import plan as barometer

STEPS, QUESTIONS = 48, 100
LAST = 10
"""Steps of the mean that a run ends with."""
SEEDS = tuple(range(3000, 3005))
LLDS = {"lambda": 0.5}
ARMS: dict[str, dict[str, Any]] = {
    "grpo": {"lambda": 0.0},
    "llds_a": LLDS,
    "llds_ma_paper": LLDS | {"answer_weight": "paper"},
    "llds_ma_code": LLDS | {"answer_weight": "code"},
}
"""Settings of `algorithm.llds`."""
SAYS = {
    "grpo": "plain GRPO",
    "llds_a": "LLDS-A, lambda .5",
    "llds_ma_paper": "LLDS-MA: answers weigh min(V / 2, 1), V searches per trajectory",
    "llds_ma_code": "LLDS-MA as released: answers weigh 0 up to one search, then more",
}
CONTRASTS = (
    ("llds_ma_paper", "llds_a"),
    ("llds_ma_code", "llds_a"),
    ("llds_a", "grpo"),
)
"""(arm, control). The first two are the question; the third says whether LLDS holds the policy at one
search."""


def configuration(arm: str, seed: int, model: Path, folder: Path, steps: int = STEPS) -> dict[str, Any]:
    """Of a cell, whose run folder is `folder/ARM/SEED`. model: the start of the seed."""
    out = copy.deepcopy(barometer.BASE)
    return out | {
        "run": {"name": str(seed), "dir": str(folder / arm)},
        "seed": seed,
        "model": {"path": str(model)},
        "data": {"train": f"lab:train_questions:{seed}", "eval": f"lab:eval_questions:{seed}"},
        "retriever": {"corpus": f"lab:train_corpus:{seed}"},
        "algorithm": {"loss": "grpo", "llds": dict(ARMS[arm])},
        "evaluation": {
            "limit": QUESTIONS,
            "sampled": True,
            "retriever": {"corpus": f"lab:eval_corpus:{seed}"},
        },
        "trainer": {"steps": steps, "eval_every": steps, "checkpoint_every": 0},
    }


def arms_table() -> str:
    """Of PLAN.md."""
    lines = ["| arm | what it is | `algorithm.llds` |", "| --- " * 3 + "|"]
    for arm, settings in ARMS.items():
        keys = ", ".join(f"`{key}={value}`" for key, value in settings.items())
        lines.append(f"| `{arm}` | {SAYS[arm]} | {keys} |")
    return "\n".join(lines)
