"""Which settings a resumed run may change. The table in docs/resume.md is made from GROUPS: `python -m
trainer.session.resume_rules`.

A checkpoint keeps the whole configuration (passwords masked) and a description of the model folder, tokenizer
included. On resume both are compared with what the run is given now. The questions are compared by the prompt
cursor, once they are loaded.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from services.common.errors import UserError
from trainer.config.schema import Config, default_of, leaf_keys, without_secrets
from trainer.learner.checkpoint import fault
from trainer.learner.model_identity import Difference, describe, differences

Change = Literal["free", "warns", "on request", "refused"]


class Group(NamedTuple):
    """Keys of the configuration that share a rule. `why` says what a change does to the run."""

    change: Change
    keys: tuple[str, ...]
    why: str


def _keys(section: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names)


GROUPS = (
    Group(
        "refused",
        ("learner.lora.rank", "learner.lora.targets"),
        "the adapters of the checkpoint have another shape",
    ),
    Group(
        "refused", ("learner.lora.alpha",), "what the adapters have learnt would be scaled by another factor"
    ),
    Group(
        "on request",
        ("model.path",),
        "another config.json, tokenizer or (with LoRA or a KL term) other base weights are another policy; a "
        "folder that "
        "was moved is the same one",
    ),
    Group(
        "on request",
        ("rollout.template", "rollout.reading", "rollout.bos"),
        "prompts and tags would be others than those that the policy was trained on",
    ),
    Group(
        "on request",
        ("reward.kind", "reward.right_at"),
        "rewards before and after mean different things, to the monitor also",
    ),
    Group(
        "on request",
        ("seed",),
        "the order of the prompts and all sampling would be others; on request a new pass begins",
    ),
    Group(
        "on request",
        ("data.shuffle",),
        "the order of the prompts would be another; on request a new pass begins",
    ),
    Group(
        "on request",
        ("data.train",),
        "the questions would be others; on request a new pass begins. A file that was moved is the same one",
    ),
    Group(
        "warns",
        (
            "algorithm.loss",
            "algorithm.advantage",
            "algorithm.dr_grpo_tokens",
            "algorithm.overlong.tokens",
            "algorithm.overlong.penalty",
        ),
        "another objective: losses, gradient norms and rewards before and after cannot be compared",
    ),
    Group(
        "warns",
        (
            "rollout.prompts_per_step",
            "rollout.group_size",
            "rollout.temperature",
            "rollout.max_turns",
            "rollout.max_response_tokens",
            "rollout.max_obs_tokens",
            "rollout.max_model_tokens",
            "rollout.topk",
            "retriever.index",
            "retriever.corpus",
        ),
        "the task or the sample is another: rewards, lengths and likelihoods before and after cannot be "
        "compared",
    ),
    Group(
        "warns",
        ("rollout.engine", "rollout.deterministic", "learner.dtype"),
        "other rounding: the run is no longer the one that an undisturbed run would have been",
    ),
    Group("warns", ("learner.betas",), "Adam's moments were gathered under the old ones"),
    Group("warns", ("data.eval", "evaluation.limit"), "scores before and after are of other questions"),
    Group(
        "warns",
        ("evaluation.retriever.index", "evaluation.retriever.corpus"),
        "scores before and after are with other passages",
    ),
    Group(
        "warns",
        ("store.url",),
        "earlier steps stay in the old store, so the lag probe is missing until it has new ones",
    ),
    Group(
        "free",
        (
            "learner.lr",
            "learner.warmup_steps",
            "learner.warmup_batches",
            "learner.match_kl",
            "learner.weight_decay",
            "learner.grad_clip",
            "learner.minibatches_per_batch",
            "learner.epochs",
            "algorithm.clip_low",
            "algorithm.clip_high",
            "algorithm.kl",
            "algorithm.entropy",
            "algorithm.dynamic_sampling",
            "algorithm.negatives",
            *_keys("algorithm", "cov_share", "cov_low", "cov_high", "cov_kl"),
            *_keys("algorithm.importance", "mode", "cap", "geometric_band", "token_band", "outlier_band"),
            *_keys("algorithm.batch_kl", "weight", "over"),
            *_keys("algorithm.supervised", "every", "data", "updates", "rows", "lr_scale"),
            *_keys("algorithm.llds", "lambda", "form", "ratio_below", "gate", "denominator", "preserve"),
            *_keys("algorithm.llds", "anchor", "snapshot_every", "min_drop"),
            *_keys("algorithm.llds", "answer_weight", "answer_lambda"),
            "rollout.max_staleness",
        ),
        "holds from the next step on",
    ),
    Group(
        "free",
        (
            "learner.ranks",
            "learner.zero_stage",
            "learner.tokens_per_microbatch",
            "learner.packing",
            "learner.logit_chunk_tokens",
            "learner.gradient_checkpointing",
            "learner.compile",
            "learner.offload_optimizer",
            "learner.start_timeout_seconds",
            "learner.step_timeout_seconds",
            "rollout.workers",
            "rollout.max_prompt_tokens",
            "rollout.top_p",
            "rollout.top_k",
            "rollout.trajectory_timeout_seconds",
            "rollout.start_timeout_seconds",
            "rollout.dtype",
            "rollout.gpu_memory_utilization",
            "rollout.kv_cache_gib",
            "rollout.tensor_parallel",
            "rollout.compile",
            "rollout.share_gpus",
            "weight_sync.backend",
            "weight_sync.timeout_seconds",
            "weight_sync.bucket_mib",
        ),
        "how it is computed, not what",
    ),
    Group(
        "free",
        (
            "run.name",
            "run.dir",
            "data.skip_bad",
            "retriever.url",
            "retriever.skip_bad",
            "retriever.timeout_seconds",
            "retriever.start_timeout_seconds",
            "evaluation.sampled",
            "evaluation.retriever.url",
            "evaluation.retriever.skip_bad",
            "evaluation.retriever.timeout_seconds",
            "evaluation.retriever.start_timeout_seconds",
            "store.token_steps",
            "store.trajectory_groups",
            "store.trajectory_steps",
            "control.enabled",
            "control.host",
            "control.port",
            "trainer.steps",
            "trainer.max_minutes",
            "trainer.eval_every",
            "trainer.eval_at_ends",
            "trainer.checkpoint_every",
            "trainer.keep_checkpoints",
            "trainer.max_restores",
            "trainer.stall_timeout_seconds",
        ),
        "where and for how long",
    ),
    Group(
        "free",
        (
            "probe.lag_steps",
            "probe.lag_size",
            "probe.fixed_size",
            "probe.displacement_size",
            "probe.every",
            "monitor.action",
            *(key for key in leaf_keys(Config) if key.startswith("monitor.rules.")),
        ),
        "what is watched; a fixed probe that is full stays as it is",
    ),
)
RULES = {key: group for group in GROUPS for key in group.keys}
WORDS = {
    "free": "may change; said in one line",
    "warns": "may change, with a warning",
    "on request": "refused, unless `--allow-changed KEY`",
    "refused": "refused",
}
_UNKNOWN = object()
"""The value of a key that the version which wrote the checkpoint did not have."""


@dataclass(frozen=True)
class Resumed:
    """A checkpoint that a run may go on from. allowed: keys of `--allow-changed`; lines: what is to be
    said."""

    checkpoint: Path
    state: dict[str, Any]
    allowed: frozenset[str] = frozenset()
    lines: list[str] = field(default_factory=list)


def identity_of(config: Config, model: Path) -> dict[str, Any]:
    """What a checkpoint keeps of its run: `settings`, the configuration by sections, and `model`, the
    description of its folder."""
    return {
        "settings": without_secrets(config.model_dump(mode="json", by_alias=True)),
        "model": describe(model),
    }


def check_allowed(keys: Iterable[str]) -> frozenset[str]:
    """The keys of `--allow-changed`. Raises UserError for one that there is not, or that can never
    change."""
    for key in keys:
        if key not in RULES:
            near = difflib.get_close_matches(key, RULES, n=1, cutoff=0.5)
            accepted = ", ".join(k for k, group in RULES.items() if group.change == "on request")
            hint = f"did you mean {near[0]}?" if near else f"accepted: {accepted}"
            raise UserError(f"--allow-changed {key}: no such key; {hint}")
        if RULES[key].change == "refused":
            raise UserError(
                f"--allow-changed {key}: cannot change on resume: {RULES[key].why}; begin a new run"
            )
    return frozenset(keys)


def go_on_from(checkpoint: Path, config: Config, model: Path, allowed: frozenset[str]) -> Resumed:
    """The checkpoint's state, if a run with this configuration and model may go on from it.

    Raises UserError, one line with the key and both values, also for a folder that is no
    whole checkpoint.
    """
    if problem := fault(checkpoint, checksums=False):
        raise UserError(f"checkpoint {checkpoint} is torn or changed: {problem}")
    state = _read(checkpoint / "state.json")
    identity = state.get("identity")
    lines = []
    if not identity:
        identity = {"settings": None, "model": describe(checkpoint / "model")}
        lines.append(
            f"warning: {checkpoint.name} is of an earlier version, which kept no settings: only its model's "
            "configuration, "
            "tokenizer and adapters, its seed and its questions are compared"
        )
    found = [
        Difference("model.path: " + d.what, d.before, d.now) for d in _model(identity["model"], config, model)
    ]
    found += _adapters(checkpoint, config)
    found += _settings(identity["settings"], config)
    _refuse(found, allowed)
    return Resumed(checkpoint, state, allowed, lines + _said(found))


def differing(checkpoint: Path, config: Config) -> list[str]:
    """For an evaluation: a warning for each setting of the rollouts that is not the one of the checkpoint's
    run."""
    if not (checkpoint / "state.json").is_file():  # what it lacks is said where its weights are read
        return []
    identity = _read(checkpoint / "state.json").get("identity")
    keys = {
        "rollout.template",
        "rollout.reading",
        "rollout.bos",
        "rollout.topk",
        "rollout.max_turns",
        "rollout.max_response_tokens",
        "rollout.max_obs_tokens",
    }
    found = [d for d in _settings(identity and identity["settings"], config) if d.what in keys]
    return [f"warning: {d.what} is {d.now}; the checkpoint was trained with {d.before}" for d in found]


def table() -> str:
    """The rules as a table in Markdown."""
    rows = ["| on resume | keys | what a change does |", "| --- | --- | --- |"]
    for group in GROUPS:
        names = ", ".join(f"`{key}`" for key in group.keys)
        if any(key.startswith("monitor.rules.") for key in group.keys):
            names = (
                ", ".join(f"`{key}`" for key in group.keys if not key.startswith("monitor.rules."))
                + ", `monitor.rules.*`"
            )
        rows.append(f"| {WORDS[group.change]} | {names} | {group.why} |")
    return "\n".join(rows) + "\n"


def _model(before: dict[str, Any], config: Config, model: Path) -> list[Difference]:
    based = config.learner.lora is not None or config.algorithm.kl > 0
    return differences(before, describe(model), weights=based)


def _adapters(checkpoint: Path, config: Config) -> list[Difference]:
    """Whether the checkpoint holds adapters, and on which scale: known of earlier versions' checkpoints
    too."""
    kept = _read(checkpoint / "learner.json").get("lora")
    now = config.learner.lora
    if kept is None and now is None:
        return []
    if kept is None or now is None:
        return [
            Difference(
                "learner.lora.rank",
                "all weights" if kept is None else "adapters",
                "all weights" if now is None else f"adapters of rank {now.rank}",
            )
        ]
    if "alpha" not in kept and kept["scale"] != now.alpha / now.rank:
        return [
            Difference("learner.lora.alpha", f"alpha / rank = {kept['scale']:g}", f"{now.alpha / now.rank:g}")
        ]
    return []


def _settings(before: dict[str, Any] | None, config: Config) -> list[Difference]:
    """Keys whose values differ. What an earlier version did not know had its default; what this one does not
    know is left out."""
    if before is None:
        return []
    now = without_secrets(config.model_dump(mode="json", by_alias=True))
    found = []
    for key in RULES:
        if key in ("model.path", "data.train"):  # by content
            continue
        old, new = _value(before, key), _value(now, key)
        if old is _UNKNOWN:
            old = default_of(key)
        if old != new:
            found.append(Difference(key, _shown(old), _shown(new)))
    return found


def _value(settings: dict[str, Any], key: str) -> Any:
    """The value of a dotted key; None in a section that is not given."""
    value: Any = settings
    for part in key.split("."):
        if value is None:
            return None
        if part not in value:
            return _UNKNOWN
        value = value[part]
    return value


def _shown(value: Any) -> str:
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)


def _refuse(found: list[Difference], allowed: frozenset[str]) -> None:
    """Raises UserError for the first difference that is neither free nor allowed; names the keys of the
    others."""
    refused = [
        d for d in found if RULES[key_of(d)].change in ("on request", "refused") and key_of(d) not in allowed
    ]
    if not refused:
        return
    first = refused[0]
    group = RULES[key_of(first)]
    way = (
        f"--allow-changed {key_of(first)} goes on all the same"
        if group.change == "on request"
        else "begin a new run"
    )
    others = sorted({key_of(d) for d in refused} - {key_of(first)})
    more = f" (also changed: {', '.join(others)})" if others else ""
    raise UserError(
        f"{first.what}: the run began with {first.before} and cannot go on with {first.now}: {group.why}; "
        f"{way}{more}"
    )


def _said(found: list[Difference]) -> list[str]:
    """The lines about changes that are accepted: a warning each, and one line for those that are free."""
    free = [d for d in found if RULES[key_of(d)].change == "free"]
    lines = [
        f"warning: {d.what} was {d.before} and is {d.now} now: {RULES[key_of(d)].why}"
        for d in found
        if d not in free
    ]
    if free:
        lines.append(
            "changed since the checkpoint: " + ", ".join(f"{d.what} {d.before} -> {d.now}" for d in free)
        )
    return lines


def key_of(difference: Difference) -> str:
    """The configuration key that a difference belongs to."""
    return difference.what.partition(":")[0]


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("not an object")
    except (OSError, ValueError) as error:
        raise UserError(f"checkpoint {path.parent}: {path.name} cannot be read: {error}") from error
    return content


if __name__ == "__main__":
    print(table(), end="")
