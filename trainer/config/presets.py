"""Settings that the name of a loss brings, beside its formula, where the user has not set them.

Sources: DAPO arXiv 2503.14476 (clip-higher; dynamic sampling), GSPO 2507.18071 (section 5.1), Dr. GRPO
2503.20783 (advantages without the standard deviation, a fixed length), CISPO 2506.13585 (no lower bound for
the weight), clip-cov and kl-cov 2505.22617 with its authors' recipes.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

DYNAMIC_SAMPLING_ROUNDS = 10
PRESETS: dict[str, dict[str, Any]] = {
    "dapo": {"clip_low": 0.2, "clip_high": 0.28, "dynamic_sampling": DYNAMIC_SAMPLING_ROUNDS},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "dr_grpo": {"advantage": "dr_grpo"},
    "cispo": {"clip_low": 1.0},
    "clip_cov": {"clip_low": 1.0, "clip_high": 1.0, "cov_share": 2e-4},
    "kl_cov": {"cov_share": 2e-3},
}
"""By loss. For other losses, and for keys that are not named here, the field's default holds."""
KEYS = ("advantage", "clip_low", "clip_high", "dynamic_sampling", "cov_share")


def promised(loss: str, settings: BaseModel) -> dict[str, Any]:
    """Values of those of KEYS that the user left to the loss. settings: the section `algorithm`."""
    preset = PRESETS.get(loss, {})
    fields = type(settings).model_fields
    return {key: preset.get(key, fields[key].default) for key in KEYS if key not in settings.model_fields_set}
