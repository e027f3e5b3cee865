"""The design of the study: base configuration, seeds, arms in their order, and the contrasts between them.

PLAN.md shows the same tables; a test holds the page to this module.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.common.errors import UserError

SEEDS = tuple(range(100, 110))
STEPS = 150
EVAL_EVERY = 30
FULL_RATE, HALF_RATE = 3e-4, 1.5e-4

BASE: dict[str, Any] = {
    "rollout": {
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
        "kv_cache_gib": 0.5,
    },
    "learner": {
        "lr": FULL_RATE,
        "minibatches_per_batch": 5,
        "epochs": 2,
        "tokens_per_microbatch": 4096,
        "zero_stage": 0,
    },
    "algorithm": {"loss": "grpo", "llds": {"lambda": 0.0}},
    "evaluation": {"limit": 500, "sampled": True},
    "control": {"enabled": False},
    "trainer": {"steps": STEPS, "eval_every": EVAL_EVERY, "checkpoint_every": 30},
}
"""Settings of every cell, beside those that name its seed (`of_seed`). All other keys have their defaults."""


@dataclass(frozen=True)
class Arm:
    """One treatment. settings: dotted keys of the configuration that differ from BASE. control: the arm
    with which it is compared. needs: what the product lacks for it; empty: nothing. family: 1 is that of
    PLAN.md, 2 that of PLAN_SECOND.md. follows: the arm whose cell of the same seed must have ended before,
    since its recorded series is an input."""

    name: str
    says: str
    settings: dict[str, Any] = field(default_factory=dict)
    control: str = ""
    needs: str = ""
    family: int = 1
    follows: str = ""


def _llds(value: float = 0.5, **others: Any) -> dict[str, Any]:
    return {"algorithm.llds.lambda": value} | {f"algorithm.llds.{key}": v for key, v in others.items()}


_HALF = {"learner.lr": HALF_RATE}

ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        # The factorial: two rates x three lambdas. Those that the claim needs come first.
        Arm("grpo", "plain GRPO at the full rate"),
        Arm("llds_0.5", "LLDS-A, lambda .5", _llds(), "grpo"),
        Arm("half_grpo", "plain GRPO at half the rate", _HALF, "grpo"),
        Arm("llds_0.2", "LLDS-A, lambda .2", _llds(0.2), "grpo"),
        Arm("half_llds_0.5", "LLDS-A, lambda .5, at half the rate", _HALF | _llds(), "half_grpo"),
        Arm("half_llds_0.2", "LLDS-A, lambda .2, at half the rate", _HALF | _llds(0.2), "half_grpo"),
        # One factor at a time, at the full rate.
        Arm("preserve_right", "LLDS-A .5 on right answers alone", _llds(preserve="right"), "llds_0.5"),
        Arm("llds_r", "LLDS-R .5: the gate is the response", _llds(gate="response"), "llds_0.5"),
        Arm("token_gate", "LLDS .5 without a gate", _llds(gate="token"), "llds_0.5"),
        Arm("denominator_all", "LLDS-A .5 over all action tokens", _llds(denominator="all"), "llds_0.5"),
        Arm("kl_0.001", "GRPO with KL .001 to the start", {"algorithm.kl": 0.001}, "grpo"),
        Arm("kl_0.1", "GRPO with KL .1 to the start", {"algorithm.kl": 0.1}, "grpo"),
        Arm("clip_higher", "GRPO, upper clip .28", {"algorithm.clip_high": 0.28}, "grpo"),
        Arm("gspo", "GSPO with its own clips (3e-4, 4e-4)", {"algorithm.loss": "gspo"}, "grpo"),
        Arm("gspo_llds_0.5", "the same with LLDS-A .5", {"algorithm.loss": "gspo"} | _llds(), "gspo"),
        Arm(
            "one_step",
            "GRPO, one optimiser step per batch",
            {"learner.minibatches_per_batch": 1, "learner.epochs": 1},
            "grpo",
        ),
        Arm(
            "stale_2",
            "GRPO, batches up to 2 versions old, token correction",
            {"rollout.max_staleness": 2, "algorithm.importance.mode": "token"},
            "grpo",
        ),
        Arm(
            "warmup_30",
            "GRPO, linear warm-up of 30 batches (300 optimiser steps)",
            {"learner.warmup_steps": 300},
            "grpo",
        ),
        # The second family (PLAN_SECOND.md). Controls for the mechanism, then cures of others.
        Arm("nll", "plain NLL on the preserved tokens, weight .5", _llds(form="nll"), "llds_0.5", family=2),
        Arm(
            "random_gate",
            "gate drawn at random with LLDS-A's active share",
            _llds(gate="random"),
            "llds_0.5",
            family=2,
        ),
        Arm(
            "matched_step",
            "GRPO with a step matched to LLDS-A's KL(old, new)",
            control="llds_0.5",
            family=2,
            follows="llds_0.5",
        ),
        Arm(
            "negatives_scaled",
            "GRPO, negative advantages x .5",
            {"algorithm.negatives": 0.5},
            "grpo",
            family=2,
        ),
        Arm(
            "kl_batch_start",
            "two-sided KL to the batch-start policy on the preserved set",
            {"algorithm.batch_kl.weight": 0.5, "algorithm.batch_kl.over": "preserved"},
            "llds_0.5",
            family=2,
        ),
        Arm(
            "sapo_search",
            "SAPO-search (arXiv 2603.10069)",
            _llds(form="sapo_search"),
            "grpo",
            family=2,
        ),
        Arm("clip_cov", "clip-cov", {"algorithm.loss": "clip_cov"}, "grpo", family=2),
        Arm("kl_cov", "kl-cov", {"algorithm.loss": "kl_cov"}, "grpo", family=2),
        Arm(
            "masks",
            "geometric, IcePop and outlier masks between sampler and learner",
            {
                "algorithm.importance.geometric_band": [0.99, 1.01],
                "algorithm.importance.token_band": [0.5, 2.0],
                "algorithm.importance.outlier_band": [1e-4, 100.0],
            },
            "grpo",
            family=2,
        ),
        Arm(
            "interleaved_sft",
            "interleaved supervised steps (arXiv 2606.26027)",
            {"algorithm.supervised.every": 5, "algorithm.supervised.data": "lab:train_demonstrations:SEED"},
            "grpo",
            family=2,
        ),
    )
}
FACTORIAL = tuple(ARMS)[:6]
RUNNABLE = tuple(name for name, arm in ARMS.items() if not arm.needs)
FAMILIES = {n: tuple(name for name in RUNNABLE if ARMS[name].family == n) for n in (1, 2)}
"""Arms by family: the contrasts of each are tested among themselves."""
CLAIM = (("llds_0.5", "grpo"), ("llds_0.5", "half_grpo"))
"""(arm, control) of the two contrasts that can refute the claim."""
GROUPS = {
    "factorial": FACTORIAL,
    "variants": FAMILIES[1][len(FACTORIAL) :],
    "all": FAMILIES[1],
    "second": FAMILIES[2],
    "corners": ("grpo", "llds_0.5", "half_grpo", "half_llds_0.5"),
}


def contrasts(present: tuple[str, ...] = RUNNABLE, family: int = 1) -> list[tuple[str, str]]:
    """(arm, control) of a family's arms that are present with their controls, in the order of the plan; the
    claim's second contrast comes after the arm that it needs last."""
    found = []
    for name in FAMILIES[family]:
        if ARMS[name].control:
            found.append((name, ARMS[name].control))
        if name == "half_grpo":
            found.append(CLAIM[1])
    return [pair for pair in found if set(pair) <= set(present)]


def chosen(names: list[str]) -> list[str]:
    """Arms by name or group, in the order of the plan.

    Raises UserError for an unknown name, and for an arm that the product cannot run yet."""
    wanted: set[str] = set()
    for name in names:
        if name not in GROUPS and name not in ARMS:
            raise UserError(f"--arms {name}: no such arm; accepted: {', '.join((*GROUPS, *RUNNABLE))}")
        wanted.update(GROUPS.get(name, (name,)))
    for name in ARMS:
        if name in wanted and ARMS[name].needs:
            raise UserError(f"--arms {name}: needs: {ARMS[name].needs}")
    return [name for name in ARMS if name in wanted]


def of_seed(seed: int, folder: Path, arm: str) -> dict[str, Any]:
    """The settings that name the seed's world, warm start and run folder (`folder/ARM/SEED`)."""
    return {
        "run": {"name": str(seed), "dir": str(folder / arm)},
        "seed": seed,
        "model": {"path": f"lab:{seed}"},
        "data": {"train": f"lab:train_questions:{seed}", "eval": f"lab:eval_questions:{seed}"},
        "retriever": {"corpus": f"lab:train_corpus:{seed}"},
        "evaluation": {"retriever": {"corpus": f"lab:eval_corpus:{seed}"}},
    }


def kept_series(folder: Path, arm: str, seed: int) -> Path:
    """The metrics of a collected cell, which an arm may follow where the cell's run folder is not there."""
    return folder / "series" / arm / f"{seed}.jsonl"


def configuration(arm: str, seed: int, folder: Path, steps: int = STEPS) -> dict[str, Any]:
    """The configuration of a cell, as `unspiral train --config` takes it."""
    out = copy.deepcopy(BASE)
    for section, values in of_seed(seed, folder, arm).items():
        out[section] = out.get(section, {}) | values if isinstance(values, dict) else values
    for key, value in ARMS[arm].settings.items():
        *sections, name = key.split(".")
        node = out
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value.replace("SEED", str(seed)) if isinstance(value, str) else value
    if followed := ARMS[arm].follows:
        kept = kept_series(folder, followed, seed)
        out["learner"]["match_kl"] = str(kept if kept.is_file() else folder / followed / str(seed))
    out["trainer"]["steps"] = steps
    return out
