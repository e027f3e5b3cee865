"""The design: base settings, cures, seeds. PLAN.md shows the same tables; a test holds the page to it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.barometer import plan as barometer
from benchmarks.collapse.planned.arms import ARMS
from benchmarks.collapse_bench import causes as _causes
from benchmarks.collapse_bench.causes import CAUSES
from benchmarks.grids.leaves import leaves
from services.common.errors import UserError

STEPS, EVAL_EVERY, QUESTIONS = 48, 12, 100
SEEDS = tuple(range(2000, 2010))
FIRST_SEEDS = SEEDS[:3]

BASE: dict[str, Any] = copy.deepcopy(barometer.BASE)
BASE["algorithm"] = {"loss": "grpo", "llds": {"lambda": 0.0}}
BASE["evaluation"] = {"limit": QUESTIONS, "sampled": True}
BASE["trainer"] = {"steps": STEPS, "eval_every": EVAL_EVERY, "checkpoint_every": 0}

HALF = "half_rate"
_OF_ARM = {
    "grpo": "grpo",
    "llds_a": "llds_0.5",
    "llds_r": "llds_r",
    "sapo_search": "sapo_search",
    "masks": "masks",
    "kl": "kl_0.1",
}
CURES: dict[str, dict[str, Any]] = {cure: dict(ARMS[arm].settings) for cure, arm in _OF_ARM.items()} | {
    HALF: {}
}
"""Settings of each cure, those of the collapse study's arms; half_rate halves the cause's learning rate."""
SAYS = {cure: ARMS[arm].says for cure, arm in _OF_ARM.items()} | {
    "grpo": "plain GRPO: no cure",
    HALF: "plain GRPO at half the cause's learning rate",
}

CURVE_CURES = ("grpo", "llds_a", "masks")
"""Of PLAN_DOSE.md."""


def chosen(
    flag: str, names: Sequence[str], groups: Mapping[str, Sequence[str]], known: Mapping[str, Any]
) -> list[str]:
    """Names in the order of the plan. Raises UserError for an unknown one."""
    wanted: set[str] = set()
    for name in names:
        if name not in groups and name not in known:
            raise UserError(f"{flag} {name}: no such name; accepted: {', '.join((*groups, *known))}")
        wanted.update(groups.get(name, (name,)))
    return [name for name in known if name in wanted]


def chosen_causes(names: Sequence[str]) -> list[str]:
    return chosen("--causes", names, _causes.GROUPS, CAUSES)


def chosen_cures(names: Sequence[str]) -> list[str]:
    return chosen("--cures", names, {"all": tuple(CURES), "curve": CURVE_CURES}, CURES)


def configuration(cause: str, cure: str, seed: int, folder: Path, steps: int = STEPS) -> dict[str, Any]:
    """The configuration of a cell, whose run folder is `folder/CAUSE+CURE/SEED`."""
    out = copy.deepcopy(BASE)
    out |= {
        "run": {"name": str(seed), "dir": str(folder / f"{cause}+{cure}")},
        "seed": seed,
        "model": {"path": f"lab:{barometer.warm_start_of(seed)}"},
        "data": {"train": f"lab:train_questions:{seed}", "eval": f"lab:eval_questions:{seed}"},
        "retriever": {"corpus": f"lab:train_corpus:{seed}"},
    }
    out["evaluation"]["retriever"] = {"corpus": f"lab:eval_corpus:{seed}"}
    for key, value in (CAUSES[cause].settings | CURES[cure]).items():
        *sections, name = key.split(".")
        node = out
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    if cure == HALF:
        out["learner"]["lr"] = out["learner"]["lr"] / 2
    out["trainer"]["steps"] = steps
    return out


def causes_table(causes: Iterable[_causes.Cause] = tuple(_causes.FIRST.values())) -> str:
    """Of PLAN.md; of PLAN_SECOND.md with its causes."""
    lines = ["| cause | what is wrong | from step | settings that differ |", "| --- " * 4 + "|"]
    for cause in causes:
        lines.append(f"| `{cause.name}` | {cause.says} | {cause.begins} | {_keys(cause.settings)} |")
    return "\n".join(lines)


def cures_table() -> str:
    """Of PLAN.md."""
    lines = ["| cure | what it is | settings that differ |", "| --- " * 3 + "|"]
    lines += [f"| `{name}` | {SAYS[name]} | {_keys(keys)} |" for name, keys in CURES.items()]
    return "\n".join(lines)


def base_lines() -> str:
    """Of PLAN.md: the settings of every cell."""
    return "\n".join(f"{key}={_value(value)}" for key, value in leaves(BASE))


def _keys(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"`{key}={_value(value)}`" for key, value in settings.items()) or "-"


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
