"""An evaluation that a run made of itself while it trained: of which weights, and how it was asked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.errors import UserError
from services.common.runs.paths import CONFIG
from services.common.users_files import load_yaml
from services.common.validation import number_of

_NAME = re.compile(r"eval_(.+)_(greedy|sampled)")
ASKED = (
    *("template", "thoughts", "reading", "max_turns", "topk"),
    *("max_prompt_tokens", "max_response_tokens", "max_obs_tokens", "max_model_tokens"),
)
"""Keys of `rollout` that say how questions are asked."""


@dataclass(frozen=True)
class OfTraining:
    """What is known of such an evaluation beside its answers."""

    weights: str
    """As of `weights_of`."""
    mode: str
    overall: Mapping[str, Any]
    """Scores of all questions, as the run posted them."""
    about: dict[str, Any]
    """How it was asked, by the run's configuration; empty where its folder has none that can be read."""

    @property
    def heading(self) -> str:
        return f"{self.weights}, {self.mode}"

    @property
    def f1(self) -> float | None:
        return number_of(self.overall.get("f1"))


def of_training(
    run: str, folder: Path | None, name: str, events: Sequence[Mapping[str, Any]]
) -> OfTraining | None:
    """name: of the answers' file. events: the run's evaluations, oldest first. None for other evaluations,
    and where the run has posted none of this name."""
    found = _NAME.fullmatch(name)
    if not found:
        return None
    tag, mode = found.groups()
    for event in reversed(events):
        data = event["data"]
        if (str(data.get("tag")), str(data.get("mode"))) != (tag, mode):
            continue
        weights = weights_of(event)
        overall = data.get("overall")
        scores = overall if isinstance(overall, Mapping) else {}
        return OfTraining(weights, mode, scores, _asked(run, weights, mode, folder))
    return None


def weights_of(event: Mapping[str, Any]) -> str:
    """The weights that an evaluation asked: `before training`, or the step."""
    return "before training" if event["step"] == 0 else f"step {event['step']}"


def _asked(run: str, weights: str, mode: str, folder: Path | None) -> dict[str, Any]:
    try:
        config = load_yaml(folder / CONFIG) if folder else None
    except (OSError, UserError):
        return {}
    rollout = _part(config, "rollout")
    if not rollout:
        return {}
    evaluation = _part(config, "evaluation")
    # A retriever for held-out questions alone comes before that of the run.
    places = (_part(evaluation, "retriever"), _part(config, "retriever"))
    where = [{k: v for k in ("url", "index", "corpus") if (v := one.get(k)) is not None} for one in places]
    found = {
        "checkpoint": f"{run}, {weights}",
        "model": _part(config, "model").get("path"),
        "questions": _part(config, "data").get("eval"),
        "limit": evaluation.get("limit"),
        **{f"retriever.{key}": value for key, value in next((one for one in where if one), {}).items()},
        "temperature": 0 if mode == "greedy" else rollout.get("temperature"),
        **{key: rollout[key] for key in ASKED if key in rollout},
    }
    return {key: v if isinstance(v, str | int | float | None) else str(v) for key, v in found.items()}


def _part(mapping: Any, key: str) -> dict[str, Any]:
    found = mapping.get(key) if isinstance(mapping, dict) else None
    return found if isinstance(found, dict) else {}
