"""What the reward of a run did from its first steps to its last, for the summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.common.files import json_lines

MOST = 10
"""Steps of each of the two means."""


def reward_course(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`{"first": {"steps": [1, 10], "mean": 0.2}, "last": the same}` of the mean rewards of a run's steps:
    MOST of them, or half of a run that is shorter. Empty with fewer than two."""
    known = [(m["step"], m["reward/mean"]) for m in metrics if isinstance(m.get("reward/mean"), int | float)]
    size = min(MOST, len(known) // 2)
    if not size:
        return {}
    return {"first": _mean(known[:size]), "last": _mean(known[-size:])}


def _mean(points: Sequence[tuple[int, float]]) -> dict[str, Any]:
    steps = [points[0][0], points[-1][0]]
    return {"steps": steps, "mean": sum(value for _, value in points) / len(points)}


def course_of_run(metrics_path: Path) -> dict[str, Any]:
    """The same of a run's file of metrics."""
    return reward_course(json_lines(metrics_path)) if metrics_path.is_file() else {}
