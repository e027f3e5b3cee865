"""What the name of a loss promises beside its formula: settings that it brings where the user has not set
them himself.

Sources: DAPO arXiv 2503.14476 (clip-higher; dynamic sampling), GSPO 2507.18071 (section 5.1), Dr. GRPO
2503.20783 (advantages without the standard deviation, a fixed length), CISPO 2506.13585 (no lower bound for
the weight).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.config.schema import AlgorithmSettings, Config

DYNAMIC_SAMPLING_ROUNDS = 10
PRESETS: dict[str, dict[str, Any]] = {
    "dapo": {"clip_low": 0.2, "clip_high": 0.28, "dynamic_sampling": DYNAMIC_SAMPLING_ROUNDS},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "dr_grpo": {"advantage": "dr_grpo"},
    "cispo": {"clip_low": 1.0},
}
"""By loss. Of other losses, and of keys that are not named here, the field's default holds."""
KEYS = ("advantage", "clip_low", "clip_high", "dynamic_sampling")


def promised(settings: AlgorithmSettings) -> dict[str, Any]:
    """Values of those of KEYS that the user left to the loss."""
    preset, fields = PRESETS.get(settings.loss, {}), type(settings).model_fields
    return {key: preset.get(key, fields[key].default) for key in KEYS if key not in settings.model_fields_set}


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
