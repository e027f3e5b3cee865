"""The files that a whole checkpoint has, without a model behind them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def fill(folder: Path, state: dict[str, Any], weights: str = "weights") -> None:
    """What a learner's rank writes into a checkpoint's folder."""
    for name in ("weights", "rng", "model"):
        (folder / name).mkdir()
    (folder / "weights" / "model.safetensors").write_text(weights * 100)
    (folder / "rng" / "model.safetensors").write_text("numbers")
    (folder / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "learner.json").write_text('{"adam_steps": 0, "snapshot": false, "lora": null}')
    (folder / "state.json").write_text(json.dumps(state))
