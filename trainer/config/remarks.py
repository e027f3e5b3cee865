"""What a user should hear about a configuration that is accepted."""

from __future__ import annotations

from trainer.config.presets import PRESETS
from trainer.config.schema import Config


def remarks(config: Config) -> list[str]:
    """One line for each setting that contradicts the name of the loss, and for each that does nothing beside
    the others."""
    a = config.algorithm
    lines = []
    for key, value in PRESETS.get(a.loss, {}).items():
        mine = getattr(a, key)
        if mine == value or (key == "dynamic_sampling" and mine):
            continue
        why = ""
        if key == "dynamic_sampling" and config.rollout.max_staleness:
            why = f" (rollout.max_staleness={config.rollout.max_staleness} excludes it)"
        lines.append(f"algorithm.loss={a.loss} runs with algorithm.{key}={mine}{why}; its own is {value}")
    without_effect = [
        (a, "dr_grpo_tokens", "algorithm", a.loss == "dr_grpo", "algorithm.loss=dr_grpo"),
        (a.importance, "cap", "algorithm.importance", a.importance.mode != "off", "a mode other than off"),
        (
            a.overlong,
            "penalty",
            "algorithm.overlong",
            a.overlong.tokens > 0,
            "algorithm.overlong.tokens above 0",
        ),
        (a.llds, "answer_lambda", "algorithm.llds", a.llds.answer_weight == "code", "answer_weight=code"),
        (a.llds, "snapshot_every", "algorithm.llds", a.llds.anchor == "snapshot", "anchor=snapshot"),
    ]
    for section, key, path, used, needs in without_effect:
        value = getattr(section, key)
        if not used and value != type(section).model_fields[key].default:
            lines.append(f"{path}.{key}={value} does nothing: it needs {needs}")
    return lines
