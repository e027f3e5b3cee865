"""The monitor's state as versions before the detectors kept it, in stores and checkpoints of running runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def upgraded(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state in today's form. States of today pass through."""
    if "detectors" in state:
        return dict(state)
    open_alarms = state["open"]
    windows = state["windows"]
    kept: dict[str, dict[str, Any]] = {
        "likelihood": {},
        "acceleration": {},
        "collapse": {
            "reward": windows["reward"],
            **{k: state[k] for k in ("best_reward", "first_reward", "low_reward", "low_since")},
        },
        "leak": {"watch": state["watches"]["leak"]},
        "nonfinite": {"count": state["nonfinite"]},
        "dead_batch": {"reward": windows["reward"], "count": state["dead"]},
        "no_reward": {"count": state.get("unrewarded", 0)},
    }
    return {
        **{k: state[k] for k in ("step", "phase", "since", "flat", "calm", "fast")},
        "signs": {k: state[k] for k in ("watches", "windows", "peaks")},
        "detectors": {rule: {"alarm": open_alarms.get(rule), **parts} for rule, parts in kept.items()},
        "open": list(open_alarms),
    }
