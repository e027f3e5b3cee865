"""Running means, baselines and extremes against thresholds, with patience in both directions: the parts that
detectors are built of. Each saves its state as plain JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

SIGMA = 1.4826
"""Standard deviations per median absolute deviation, for normal noise."""


LARGEST = 1e100
"""Values beyond it count as it: sums and products of them stay finite, and so does a saved state."""


def number(value: Any) -> float | None:
    """The value where it is a finite number, of Python, NumPy or a tensor; otherwise None."""
    if not isinstance(value, float):
        if value is None or isinstance(value, str | bytes):
            return None
        try:
            value = float(value)
        except OverflowError:  # an integer of hundreds of digits
            value = LARGEST if value > 0 else -LARGEST
        except (TypeError, ValueError, RuntimeError):  # a list, a dictionary, an array of several values
            return None
    if not math.isfinite(value):
        return None
    return float(max(-LARGEST, min(LARGEST, value)))


class Window:
    """The last `size` values of one metric. None and values that are not finite are passed over."""

    def __init__(self, size: int):
        self.size = size
        self.values: list[float] = []

    def add(self, value: float | None) -> bool:
        """Whether the value counted."""
        if value is None or not math.isfinite(value):
            return False
        # A new list: `state_dict` has given the old one away.
        self.values = [*self.values, float(value)][-self.size :]
        return True

    @property
    def full(self) -> bool:
        return len(self.values) >= self.size

    @property
    def mean(self) -> float | None:
        return sum(self.values) / len(self.values) if self.values else None

    @property
    def full_mean(self) -> float | None:
        """The mean once the window is full; None before."""
        return self.mean if self.full else None

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
        # The median |difference| of two normals is .954 standard deviations.
        return steps[len(steps) // 2] / 0.954 if len(steps) > 6 else 0.0


class Peak:
    """The highest value of the last `memory` steps."""

    def __init__(self, memory: int):
        self.memory = memory
        self.values: list[tuple[int, float]] = []
        """(step, value) of those that no later value tops."""

    def highest(self, step: int, value: float) -> float:
        # What is lower than a later value can never be the highest again: the list stays short, and falls
        # from its first entry on.
        kept = [(s, v) for s, v in self.values if v > value and s > step - self.memory]
        self.values = [*kept, (step, value)]
        return self.values[0][1]


class Baseline:
    """The usual level of a metric: median and deviation of `size` values after `warmup` values were passed
    over.

    The level of the moment would not do: it follows a slow drift, and the drift is what is looked for. A new
    level takes the baseline's place once the metric has held it (within TOLERANCE) for HOLD values, unless
    the caller forbids it because an alarm stands.
    """

    HOLD = 100
    TOLERANCE = 0.25

    def __init__(self, warmup: int, size: int):
        self.warmup = warmup
        self.seen = 0
        self.window = Window(size)
        self.recent = Window(size)
        self.held = 0
        self.level: float | None = None
        """The recent level that has been held for `held` values."""
        self.median = 0.0
        self.sigma = 0.0
        """Standard deviation of the noise, from the median absolute deviation."""
        self.first: list[float] = []
        """The window of the first usual level, once another has taken its place."""

    @property
    def ready(self) -> bool:
        return self.window.full

    def before(self) -> Baseline | None:
        """The first usual level, where another has taken its place."""
        if not self.first:
            return None
        found = Baseline(self.warmup, self.window.size)
        found.window.values = list(self.first)
        found._measure()
        return found

    def _measure(self) -> None:
        """The window changes seldom and is read at every step, so median and deviation are kept."""
        if self.window.full:
            self.median = self.window.median
            self.sigma = SIGMA * self.window.deviation

    def add(self, value: float, *, may_renew: bool = True) -> None:
        self.seen += 1
        if self.seen <= self.warmup:
            return
        if not self.window.full:
            self.window.add(value)
            self._measure()
            return
        self.recent.add(value)
        if not self.recent.full:
            return
        middle = self.recent.median
        # Compared with where the hold began and not with the step before: a slow drift must not pass for a
        # level.
        if self.level is not None and abs(middle - self.level) <= self.TOLERANCE * abs(self.level):
            self.held += 1
        else:
            self.level = middle
            self.held = 0
        if self.held >= self.HOLD and may_renew:
            self.first = self.first or self.window.values
            self.window.values = list(self.recent.values)
            self._measure()
            self.held = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "seen": self.seen,
            "window": self.window.values,
            "recent": self.recent.values,
            "held": self.held,
            "level": self.level,
            "first": self.first,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.first = list(state.get("first", []))  # earlier versions forgot it
        self.seen = state["seen"]
        self.window.values = list(state["window"])
        self.recent.values = list(state["recent"])
        self.held = state["held"]
        self.level = state["level"]
        self._measure()


class Watch:
    """Active once the mean of `window` values has been past `enter` for `patience` steps running, until past
    `leave` for `leave_patience`.

    The side is given by the thresholds: enter < leave watches for low values, enter > leave for high ones.
    `since` is the first step of the run of bad steps that made it active.
    """

    KEYS = ("bad", "good", "active", "since", "first_bad", "past")

    def __init__(self, enter: float, leave: float, *, window: int, patience: int, leave_patience: int):
        self.enter = enter
        self.leave = leave
        self.patience = patience
        self.leave_patience = leave_patience
        self.window = Window(window)
        self.bad = 0
        self.good = 0
        self.active = False
        self.past = False
        self.since: int | None = None
        self.first_bad: int | None = None

    @property
    def mean(self) -> float | None:
        return self.window.full_mean

    def update(self, step: int, value: float | None) -> None:
        """A missing value changes nothing."""
        self.window.add(value)
        mean = self.window.full_mean
        if mean is None or value is None or not math.isfinite(value):
            return
        low = self.enter < self.leave
        # Between `enter` and `leave` both counts begin anew: a value at the edge does not make the alarm
        # flicker.
        self.past = mean < self.enter if low else mean > self.enter
        if self.past:
            self.first_bad = step if self.bad == 0 else self.first_bad
        self.bad = self.bad + 1 if self.past else 0
        self.good = self.good + 1 if (mean > self.leave if low else mean < self.leave) else 0
        if not self.active and self.bad >= self.patience:
            self.active = True
            self.since = self.first_bad
        elif self.active and self.good >= self.leave_patience:
            self.active = False

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.window.values, **{k: getattr(self, k) for k in self.KEYS}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.window.values = list(state["values"])
        for key in self.KEYS:
            setattr(self, key, state[key])


class Streak:
    """Steps running in which something was seen."""

    def __init__(self) -> None:
        self.count = 0

    def update(self, seen: bool) -> None:
        self.count = self.count + 1 if seen else 0
