"""The design: kinds of run, what is expected of the monitor in each, and which seeds may be looked at.

PLAN.md shows the same tables; a test holds the page to this module.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.barometer import faults
from benchmarks.barometer.faults import BEGINS, Fault
from benchmarks.grids.leaves import leaves
from services.common.errors import UserError
from services.likelihood.monitor.alarms import Rule

STEPS = 72
EVAL_EVERY = 10
LOOKED_AT = (900, 901, 902, 903)
"""Seeds whose runs may be read while thresholds, faults or metrics are chosen."""
HELD_OUT_SEEDS = tuple(range(1004, 1024))
"""Seeds whose runs nothing is chosen by. Once one has been used to mend something it is named in SPENT."""
SPENT: tuple[int, ...] = (1000, 1001, 1002, 1003)
WARM_STARTS = (0, 500)
"""Seeds of the warm starts, which runs take by turns: a warm start costs as much as a run."""

BASE: dict[str, Any] = {
    "rollout": {
        "engine": "transformers",
        "template": "lab",
        "deterministic": True,
        "prompts_per_step": 8,
        "group_size": 5,
        "max_turns": 3,
        "topk": 2,
        "max_response_tokens": 24,
        "max_obs_tokens": 40,
        "max_prompt_tokens": 32,
        "max_model_tokens": 256,
    },
    "learner": {
        "lr": 1e-4,
        "minibatches_per_batch": 4,
        "epochs": 1,
        "tokens_per_microbatch": 4096,
        "zero_stage": 0,
    },
    "algorithm": {"loss": "grpo", "llds": {"lambda": 0.2}},
    "evaluation": {"limit": 60},
    "control": {"enabled": False},
    "trainer": {"steps": STEPS, "eval_every": EVAL_EVERY, "checkpoint_every": 0},
}
"""Settings of every cell, beside those that name its seed. All other keys have their defaults."""

Class = Literal["healthy", "injected", "driven"]
OF_THE_FALL: tuple[Rule, ...] = ("likelihood", "acceleration", "collapse", "dead_batch")


@dataclass(frozen=True)
class Kind:
    """One kind of run. settings: dotted keys that differ from BASE. expected: one of these rules must
    fire.

    healthy: every alarm is a false one. injected: `fault` breaks something at step BEGINS; an alarm of any
    other rule counts neither for nor against. driven: settings under which a policy may fall, from the first
    step on; only the runs whose reward fell are counted.
    """

    name: str
    says: str
    kind: Class
    expected: tuple[Rule, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    fault: type[Fault] = Fault
    begins: int = BEGINS
    """First step at which something is wrong (injected)."""


def _healthy(name: str, says: str, **settings: Any) -> Kind:
    return Kind(name, says, "healthy", settings={k.replace("__", "."): v for k, v in settings.items()})


def _injected(name: str, says: str, expected: tuple[Rule, ...], fault: type[Fault]) -> Kind:
    return Kind(name, says, "injected", expected, fault=fault)


def _driven(name: str, says: str, expected: tuple[Rule, ...], **settings: Any) -> Kind:
    return Kind(name, says, "driven", expected, {k.replace("__", "."): v for k, v in settings.items()})


_TEN_STEPS: dict[str, Any] = {"learner__minibatches_per_batch": 5, "learner__epochs": 2}
_FAST: dict[str, Any] = {"learner__lr": 3e-4, "algorithm__llds__lambda": 0.0}
_HELD: dict[str, Any] = {"learner__lr": 3e-4, "algorithm__llds__lambda": 0.5}
_PAIRS: dict[str, Any] = {"rollout__prompts_per_step": 20, "rollout__group_size": 2}
_SLOW: dict[str, Any] = {"learner__lr": 5e-5}

_ALL = (
    _healthy("healthy", "LLDS-A .2 at rate 1e-4, four optimiser steps per batch"),
    _healthy("healthy_plain", "plain GRPO at half that rate", **_SLOW, algorithm__llds__lambda=0.0),
    _healthy(
        "healthy_groups", "five prompts, groups of eight", rollout__prompts_per_step=5, rollout__group_size=8
    ),
    _healthy(
        "healthy_warmup",
        "half the rate, two passes over each batch, warm-up over 20 batches",
        **_SLOW,
        learner__epochs=2,
        learner__warmup_steps=160,
    ),
    _injected("silent_tool", "searches return no document", ("retrieval",), faults.SilentTool),
    _injected("empty_documents", "documents have a title and no text", ("retrieval",), faults.EmptyDocuments),
    _injected(
        "noisy_retriever",
        "four of five searches return documents at random",
        ("retrieval", *OF_THE_FALL),
        faults.NoisyRetriever,
    ),
    _injected(
        "stuck_retriever",
        "every search returns the same two documents",
        ("retrieval",),
        faults.StuckRetriever,
    ),
    _injected(
        "failing_retriever", "every second search needs a second try", ("retrieval",), faults.FailingRetriever
    ),
    _injected("judge_down", "no reward for five steps", ("no_reward",), faults.JudgeDown),
    _injected("paid_for_form", "any answer earns 1 in training", ("reward_gap",), faults.PaidForForm),
    _injected(
        "lucky_garbage",
        "seven of ten trajectories earn 1 in training, by chance",
        ("reward_gap", "garbage", "entropy_high"),
        faults.LuckyGarbage,
    ),
    _injected("mismatch", "noise on the sampler's weights", ("mismatch",), faults.Mismatch),
    _injected("leak", "one name in five can't be sampled", ("leak",), faults.Leak),
    _injected(
        "short_turns", "turns are cut off after six tokens", ("validity", "truncation"), faults.ShortTurns
    ),
    _injected(
        "control_shock",
        "noise on the embeddings of the tags",
        ("control_tokens", "validity"),
        faults.ControlShock,
    ),
    Kind(
        "silent_llds",
        "LLDS with a min_drop of 5 nats",
        "injected",
        ("silent_llds",),
        {"algorithm.llds.min_drop": 5.0},
        begins=1,
    ),
    _driven(
        "high_rate",
        "plain GRPO at rate 3e-4, ten steps per batch",
        OF_THE_FALL,
        **_FAST,
        **_TEN_STEPS,
    ),
    _driven("high_rate_llds", "the same with LLDS-A .5", OF_THE_FALL, **_HELD, **_TEN_STEPS),
    _driven(
        "groups_of_two",
        "twenty prompts in groups of two, LLDS-A .5, the same rate and steps",
        OF_THE_FALL,
        **_HELD,
        **_TEN_STEPS,
        **_PAIRS,
    ),
    _driven(
        "stale_8",
        "plain GRPO at rate 3e-4 on batches up to eight versions old",
        OF_THE_FALL,
        **_FAST,
        rollout__max_staleness=8,
        algorithm__importance__mode="off",
    ),
    _driven(
        "entropy_bonus", "an entropy bonus of .3", ("entropy_high", *OF_THE_FALL), algorithm__entropy=0.3
    ),
)
KINDS: dict[str, Kind] = {kind.name: kind for kind in _ALL}


def kinds_table() -> str:
    """Of PLAN.md."""
    lines = ["| kind | what it is | settings that differ | class | expected rules |", "| --- " * 5 + "|"]
    for kind in KINDS.values():
        keys = ", ".join(f"`{key}={_value(value)}`" for key, value in kind.settings.items())
        rules = ", ".join(f"`{rule}`" for rule in kind.expected) or "none"
        begins = f", from step {kind.begins} on" if kind.kind == "injected" else ""
        lines.append(f"| `{kind.name}` | {kind.says} | {keys or '-'} | {kind.kind}{begins} | {rules} |")
    return "\n".join(lines)


def base_lines() -> str:
    """Of PLAN.md: the settings of every cell."""
    return "\n".join(f"{key}={_value(value)}" for key, value in leaves(BASE))


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def chosen(names: list[str]) -> list[str]:
    """Kinds in the order given; `all` stands for those that are not named. Raises UserError for an unknown
    name."""
    for name in names:
        if name != "all" and name not in KINDS:
            raise UserError(f"--kinds {name}: no such kind; accepted: all, {', '.join(KINDS)}")
    rest = [name for name in KINDS if name not in names]
    found = [kind for name in names for kind in (rest if name == "all" else [name])]
    return list(dict.fromkeys(found))


def split_of(seed: int) -> str:
    """`looked at` or `held out`. Raises UserError for a seed of neither."""
    if seed in LOOKED_AT or seed in SPENT:
        return "looked at"
    if seed in HELD_OUT_SEEDS:
        return "held out"
    raise UserError(
        f"--seeds {seed}: not in the plan; looked at are {LOOKED_AT[0]} to {LOOKED_AT[-1]}, "
        f"held out {HELD_OUT_SEEDS[0]} to {HELD_OUT_SEEDS[-1]}"
    )


def warm_start_of(seed: int) -> int:
    return WARM_STARTS[seed % len(WARM_STARTS)]


def configuration(kind: str, seed: int, folder: Path, steps: int = STEPS) -> dict[str, Any]:
    """The configuration of a cell, as `unspiral train --config` takes it. A world of its own, a warm start
    that it shares with others."""
    out = copy.deepcopy(BASE)
    out |= {
        "run": {"name": str(seed), "dir": str(folder / kind)},
        "seed": seed,
        "model": {"path": f"lab:{warm_start_of(seed)}"},
        "data": {"train": f"lab:train_questions:{seed}", "eval": f"lab:eval_questions:{seed}"},
        "retriever": {"corpus": f"lab:train_corpus:{seed}"},
    }
    out["evaluation"]["retriever"] = {"corpus": f"lab:eval_corpus:{seed}"}
    for key, value in KINDS[kind].settings.items():
        *sections, name = key.split(".")
        node = out
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    out["trainer"]["steps"] = steps
    return out
