"""How an exported model was asked while it learnt: template, tags, chat template and limits, which its folder
keeps in `unspiral_export.json`. A model knows no other prompts and tags."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from services.common.errors import UserError
from services.common.files import hints
from services.rollout.worker.templates import template_class
from services.settings import RolloutSettings
from trainer.learner.export import EXPORT_MARK

PROMPTS = ("template", "reading", "bos", "thoughts", "tools")
"""Settings of the rollout that make prompts and tags."""
TASK = ("topk", "max_turns", "max_response_tokens", "max_obs_tokens")
"""Those that make another task of the same questions."""
KEPT = (*PROMPTS, *TASK, "max_prompt_tokens", "max_model_tokens")


def how_asked(settings: RolloutSettings, model: Path) -> dict[str, Any]:
    """What an export of a model that was trained so keeps, JSON-able: `rollout` (settings), `tags` (names, or
    what ends an action where the template has no names) and `chat_template`. model: the folder it began
    with."""
    values = settings.model_dump(mode="json")
    return {
        "rollout": {name: values[name] for name in KEPT},
        "tags": _tags(settings),
        "chat_template": _chat_template(model),
    }


def kept_in(model: Path) -> dict[str, Any]:
    """The settings of the rollout that a model's folder keeps, by name; empty where it keeps none."""
    asked = hints(model / EXPORT_MARK).get("asked")
    rollout = asked.get("rollout") if isinstance(asked, dict) else None
    return {name: rollout[name] for name in KEPT if name in rollout} if isinstance(rollout, dict) else {}


def unlike(
    model: Path, settings: RolloutSettings, *, task: bool = False, name: str | Path | None = None
) -> str | None:
    """One line where a model's folder keeps other settings than these, or another chat template than the one
    that it has now; otherwise None. task: those of the task are compared too. name: what the user calls the
    model, where the folder is a temporary one."""
    called = name or model
    kept, now = kept_in(model), settings.model_dump(mode="json")
    names = [n for n in (*PROMPTS, *(TASK if task else ())) if n in kept and kept[n] != now[n]]
    said = []
    if names:
        here = ", ".join(f"rollout.{name} is {_shown(now[name])}" for name in names)
        learnt = " ".join(f"rollout.{name}={_shown(kept[name])}" for name in names)
        said.append(
            f"{here}; the model in {called} learnt with {learnt}: give that, or it is asked otherwise"
        )
    before = kept and hints(model / EXPORT_MARK)["asked"].get("chat_template")
    if before and before != _chat_template(model):
        said.append(f"the chat template in {called} is not the one that the model learnt with")
    return f"warning: {'; '.join(said)}" if said else None


def _tags(settings: RolloutSettings) -> list[str]:
    with suppress(UserError):  # where it cannot be loaded, the run itself says so
        kind = template_class(settings.template)
        tags: tuple[str, ...] = getattr(kind, "tags", ())
        return [*(tags or getattr(kind, "stop", ())), *settings.tools]
    return []


def _chat_template(model: Path) -> dict[str, str] | None:
    """File and checksum of the chat template of a model's folder; None where it has none."""
    for name in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json"):
        file = model / name
        if name.endswith(".jinja"):
            text = file.read_text(encoding="utf-8") if file.is_file() else None
        else:
            text = hints(file).get("chat_template")
        if text:
            whole = text if isinstance(text, str) else json.dumps(text, sort_keys=True)
            return {"file": name, "sha256": hashlib.sha256(whole.encode()).hexdigest()}
    return None


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
