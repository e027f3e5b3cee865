"""An evaluation that a run made of itself while it trained: of which weights, and how it was asked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.errors import UserError
from services.common.runs.paths import CONFIG, EVENTS
from services.common.users_files import load_yaml
from services.common.validation import number_of
from services.likelihood.store.base import EVALUATION

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
    made: float
    """Unix seconds, of the event: those of the file change with every copy."""
    sources: Mapping[str, Mapping[str, Any]]
    """The same scores of each source, as the run's own events have them; empty without its folder."""
    about: dict[str, Any]
    """How it was asked, by the run's configuration; empty where its folder has none that can be read."""

    @property
    def heading(self) -> str:
        return f"{self.weights}, {self.mode}"

    @property
    def f1(self) -> float | None:
        return number_of(self.overall.get("f1"))

    def f1_of(self, source: str) -> float | None:
        found = self.sources.get(source)
        return number_of(found.get("f1")) if isinstance(found, Mapping) else None


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
        sources = _sources(folder, tag, mode, event["step"])
        return OfTraining(weights, mode, scores, event["time"], sources, _asked(run, weights, mode, folder))
    return None


def weights_of(event: Mapping[str, Any]) -> str:
    """The weights that an evaluation asked: `before training`, or the step."""
    return "before training" if event["step"] == 0 else f"step {event['step']}"


def name_of(event: Mapping[str, Any]) -> str:
    """The name of its answers, in `trajectories/`."""
    return f"eval_{event['data'].get('tag', '')}_{event['data'].get('mode', '')}"


def _sources(folder: Path | None, tag: str, mode: str, step: int) -> Mapping[str, Mapping[str, Any]]:
    """The answers of training hold no F1, and the event that is posted has that of all questions alone."""
    found: Mapping[str, Mapping[str, Any]] = {}
    if folder is None:
        return found
    try:
        with open(folder / EVENTS, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if '"evaluation"' not in line:
                    continue
                with suppress(ValueError, RecursionError):
                    one = json.loads(line)
                    if _told(one) == (EVALUATION, tag, mode, step) and isinstance(one.get("sources"), dict):
                        found = one["sources"]
    except OSError:
        return {}
    return found


def _told(event: Any) -> tuple[Any, ...]:
    return (
        tuple(event.get(key) for key in ("event", "tag", "mode", "step")) if isinstance(event, dict) else ()
    )


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
