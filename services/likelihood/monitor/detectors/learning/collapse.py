"""`collapse`: the mean reward stays under half of its best."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.likelihood.monitor.alarms import Alarm
from services.likelihood.monitor.detectors.base import Metrics, Rising
from services.likelihood.monitor.watch import Window, number
from services.settings import MonitorRules


class Collapse(Rising):
    rule = "collapse"
    reads = ("reward/mean",)
    advice = (
        "Roll back to a checkpoint from before the likelihood alarm and lower learner.lr; going on from here "
        "rarely helps."
    )
    RISE = 0.1
    """Once collapsed, the mean must rise this share of the best above the threshold to end it."""

    def __init__(self, rules: MonitorRules):
        super().__init__(rules)
        self.window = Window(rules.reward_window)
        self.best: float | None = None
        self.first: float | None = None
        """The first mean of a full window."""
        self.low = 0
        """Steps running with a low mean."""
        self.low_since: int | None = None

    def read(self, step: int, metrics: Metrics) -> None:
        added = self.window.add(number(metrics.get("reward/mean")))
        mean = self.window.full_mean
        if not added or mean is None:
            return
        r = self.rules
        self.first = mean if self.first is None else self.first
        self.best = mean if self.best is None else max(self.best, mean)
        if self.best >= r.reward_floor and mean < r.collapse_share * self.best:
            self.low_since = step if self.low == 0 else self.low_since
            self.low += 1
        elif not self.stands() or mean > (r.collapse_share + self.RISE) * self.best:
            self.low = 0

    @property
    def rewards_seen(self) -> bool:
        return self.window.full

    @property
    def reward_holds(self) -> bool:
        """Reward is near its best, and above what it was at first."""
        mean = self.window.full_mean
        if mean is None or self.best is None or self.first is None:
            return False
        return mean >= self.rules.hold_share * self.best and mean > self.first

    def stands(self) -> bool:
        return self.low >= self.rules.reward_window

    def describe(self, step: int) -> Alarm:
        share = self.rules.collapse_share
        best = self.best or 0.0
        value = self.window.mean
        seen = f"mean reward {value:.3f} is under {share:.0%} of its best, {best:.3f}, for {self.low} steps"
        return self.raised(step, "reward/mean", self.low_since, seen, value, share * best)

    def state(self) -> dict[str, Any]:
        return {
            "reward": self.window.values,
            "best_reward": self.best,
            "first_reward": self.first,
            "low_reward": self.low,
            "low_since": self.low_since,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.window.values = list(state["reward"])
        self.best = state["best_reward"]
        self.first = state["first_reward"]
        self.low = state["low_reward"]
        self.low_since = state["low_since"]
