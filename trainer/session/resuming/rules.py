"""Which settings a resumed run may change. The lists in docs/resume.md are made from GROUPS: `python -m
trainer.session.resuming.rules`.

A checkpoint keeps the whole configuration (passwords masked) and a description of the model folder, tokenizer
included. On resume both are compared with what the run is given now. The questions are compared by the prompt
cursor, once they are loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.common.errors import UserError
from services.common.names import nearest
from services.common.users_files import load_object
from trainer.config.schema import Config, default_of, without_secrets
from trainer.learner.checkpoint import fault
from trainer.learner.model.asked import how_asked
from trainer.learner.model.model_identity import Difference, describe, differences
from trainer.session.resuming.groups import GROUPS

RULES = {key: group for group in GROUPS for key in group.keys}
WORDS = {
    "free": "may change; said in one line",
    "warns": "may change, with a warning",
    "on request": "refused, unless `--allow-changed KEY`",
    "refused": "refused",
}


@dataclass(frozen=True)
class Resumed:
    """A checkpoint that a run may go on from. allowed: keys of `--allow-changed`; lines: what is to be
    said."""

    checkpoint: Path
    state: dict[str, Any]
    allowed: frozenset[str] = frozenset()
    lines: list[str] = field(default_factory=list)


def identity_of(config: Config, model: Path) -> dict[str, Any]:
    """What a checkpoint keeps of its run: `settings`, the configuration by sections, `model`, the description
    of its folder, and `asked`, for exports."""
    return {
        "settings": without_secrets(config.model_dump(mode="json", by_alias=True)),
        "model": describe(model),
        "asked": how_asked(config.rollout, model),
    }


def check_allowed(keys: Iterable[str]) -> frozenset[str]:
    """The keys of `--allow-changed`. Raises UserError for one that there is not, or that can never
    change."""
    for key in keys:
        if key not in RULES:
            near = nearest(key, RULES)
            accepted = ", ".join(k for k, group in RULES.items() if group.change == "on request")
            hint = f"did you mean {near}?" if near else f"accepted: {accepted}"
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
        "rollout.thoughts",
        "rollout.tools",
        "rollout.topk",
        "rollout.max_turns",
        "rollout.max_response_tokens",
        "rollout.max_obs_tokens",
    }
    found = [d for d in _settings(identity and identity["settings"], config) if d.what in keys]
    return [f"warning: {d.what} is {d.now}; the checkpoint was trained with {d.before}" for d in found]


def table() -> str:
    """The rules as lists in Markdown, the strictest first: a heading per rule, and per group of keys what a
    change of them does."""
    lines = []
    for change in ("refused", "on request", "warns", "free"):
        words = WORDS[change]
        lines += [f"### {words[0].upper()}{words[1:]}", ""]
        for group in GROUPS:
            if group.change == change:
                lines += [f"- {group.why[0].upper()}{group.why[1:]}:", *_listed(group.keys)]
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def _listed(keys: Iterable[str]) -> list[str]:
    """Keys as items of a list: those of a section in one."""
    shown = dict.fromkeys("monitor.rules.*" if key.startswith("monitor.rules.") else key for key in keys)
    sections: dict[str, list[str]] = {}
    for key in shown:
        sections.setdefault(key.rpartition(".")[0], []).append(f"`{key}`")
    return [f"    - {', '.join(names)}" for names in sections.values()]


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
        if old != new:
            found.append(Difference(key, _shown(old), _shown(new)))
    return found


def _value(settings: dict[str, Any], key: str) -> Any:
    """The value of a dotted key; None in a section that is not given. What is not known has its default, a
    section too."""
    parts = key.split(".")
    value: Any = settings
    for depth, part in enumerate(parts, 1):
        if value is None:
            return None
        value = value[part] if part in value else default_of(".".join(parts[:depth]))
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
    return load_object(path, f"checkpoint {path.parent}: {path.name}")


if __name__ == "__main__":
    print(table(), end="")
