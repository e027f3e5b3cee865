"""Running means and extremes against thresholds, with patience in both directions: what the phase monitor is
built of."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any


class Window:
    """The last `size` values of one metric. None and values that are not finite are passed over."""

    def __init__(self, size: int):
        self.size, self.values = size, []

    def add(self, value: float | None) -> bool:
        """Whether the value counted."""
        if value is None or not math.isfinite(value):
            return False
        self.values = [*self.values, float(value)][-self.size :]
        return True

    @property
    def full(self) -> bool:
        return len(self.values) >= self.size

    @property
    def mean(self) -> float | None:
        return sum(self.values) / len(self.values) if self.values else None

    @property
    def median(self) -> float:
        return sorted(self.values)[len(self.values) // 2]

    @property
    def deviation(self) -> float:
        """Median absolute deviation."""
        middle = self.median
        return sorted(abs(v - middle) for v in self.values)[len(self.values) // 2]

    @property
    def noise(self) -> float:
        """Standard deviation of one value around its slow course, from the median of successive differences;
        0 with fewer than 8 values."""
        steps = sorted(abs(b - a) for a, b in pairwise(self.values))
        return (
            steps[len(steps) // 2] / 0.954 if len(steps) > 6 else 0.0
        )  # median |difference| of two normals: .954 sd


class Peak:
    """The highest value of the last `memory` steps."""

    def __init__(self, memory: int):
        self.memory, self.values = memory, []  # (step, value) of those that no later one tops

    def highest(self, step: int, value: float) -> float:
        kept = [(s, v) for s, v in self.values if v > value and s > step - self.memory]
        self.values = [*kept, (step, value)]
        return self.values[0][1]


class Watch:
    """Active once the mean of `window` values has been past `enter` for `patience` steps running, until past
    `leave` for `leave_patience`.

    The side is given by the thresholds: enter < leave watches for low values, enter > leave for high ones.
    `since` is the first step of the run of bad steps that made it active.
    """

    KEYS = ("bad", "good", "active", "since", "first_bad", "past")

    def __init__(self, enter: float, leave: float, *, window: int, patience: int, leave_patience: int):
        self.enter, self.leave, self.patience, self.leave_patience = enter, leave, patience, leave_patience
        self.window = Window(window)
        self.bad = self.good = 0
        self.active = self.past = False
        self.since = self.first_bad = None

    @property
    def mean(self) -> float | None:
        return self.window.mean if self.window.full else None

    def update(self, step: int, value: float | None) -> None:
        """A missing value changes nothing."""
        if not self.window.add(value) or not self.window.full:
            return
        mean, low = self.window.mean, self.enter < self.leave
        self.past = mean < self.enter if low else mean > self.enter
        if self.past:
            self.first_bad = step if self.bad == 0 else self.first_bad
        self.bad = self.bad + 1 if self.past else 0
        self.good = self.good + 1 if (mean > self.leave if low else mean < self.leave) else 0
        if not self.active and self.bad >= self.patience:
            self.active, self.since = True, self.first_bad
        elif self.active and self.good >= self.leave_patience:
            self.active = False

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.window.values, **{k: getattr(self, k) for k in self.KEYS}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.window.values = list(state["values"])
        for key in self.KEYS:
            setattr(self, key, state[key])
