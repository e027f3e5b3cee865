"""A step size that follows another run's: the control that asks whether a method is more than a smaller step.

The divergence of an update from the policy that sampled grows with the square of the step size, for small
steps. So the size of the next step is known from what the last ones of this run did at theirs.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path

from services.common.errors import UserError
from services.common.files import json_lines
from services.common.runs.paths import METRICS
from services.common.users_files import reading

METRIC = "kl/old"
SCALE = "learner/match_scale"
LOOK_BACK = 5
"""Latest steps from which the divergence of a step of full size is known."""
MOST_CHANGE = 2.0
"""Largest factor between the sizes of two steps."""
SMALLEST, LARGEST = 1e-3, 1e3


def read_series(path: str) -> dict[int, float]:
    """`kl/old` by step, from a run's folder or its metrics.jsonl. Raises UserError for a file that is not
    there, or has none."""
    key = f"learner.match_kl: {path}"
    file = Path(path)
    if file.is_dir():
        file /= METRICS
    if not file.is_file():
        raise UserError(f"{key}: no such run; expected its folder, or its metrics.jsonl")
    with reading(key, "metrics of a run"):
        rows = json_lines(file)
        found = {int(row["step"]): row[METRIC] for row in rows if "step" in row and METRIC in row}
    series = {step: float(value) for step, value in found.items() if _is_positive(value)}
    if not series:
        raise UserError(f"{key}: records no {METRIC} above 0; expected a run whose updates moved its weights")
    return series


class MatchedStep:
    """The factor on the learning rate for each step, and what it brought about."""

    def __init__(self, series: dict[int, float]) -> None:
        self.series = series
        self.history: dict[int, tuple[float, float]] = {}
        """By step: the factor, and the divergence that came of it."""

    def scale(self, step: int) -> float:
        """The factor for `step`. 1 before anything was measured; where the other run has no divergence for
        the step, the factor of the step before."""
        past = [self.history[s] for s in sorted(self.history) if s < step]
        if not past:
            return 1.0
        last = past[-1][0]
        target = self.series.get(step)
        if target is None:
            return last
        full_size = statistics.fmean(kl / scale**2 for scale, kl in past[-LOOK_BACK:])
        wanted = math.sqrt(target / full_size)
        near = min(max(wanted, last / MOST_CHANGE), last * MOST_CHANGE)
        return min(max(near, SMALLEST), LARGEST)

    def observe(self, step: int, scale: float, divergence: float | None) -> None:
        """What an update did. Without a divergence above 0 the step says nothing, and is left out."""
        if _is_positive(divergence):
            self.history[step] = (scale, float(divergence or 0.0))

    def restore(self, metrics: Path, step: int) -> None:
        """Know what this run's own steps up to `step` did, from its metrics.jsonl."""
        self.history = {}
        for row in json_lines(metrics):
            if row.get("step", step + 1) <= step and SCALE in row:
                self.observe(row["step"], row[SCALE], row.get(METRIC))


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0
