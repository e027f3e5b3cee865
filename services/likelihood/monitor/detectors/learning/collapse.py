"""`collapse`: the mean reward stays under half of its best."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.likelihood.monitor.alarms import Alarm
from services.likelihood.monitor.detectors.base import Metrics, Rising, too_few
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
        self.lowest: float | None = None
        """The lowest mean."""
        self.floor = 0.0
        """The lowest mean from before the best one."""
        self.recent = Window(2 * rules.baseline_steps)
        """Single rewards, for their noise."""
        self.low = 0
        """Steps running with a low mean."""
        self.low_since: int | None = None

    def read(self, step: int, metrics: Metrics) -> None:
        reward = number(metrics.get("reward/mean"))
        added = self.window.add(reward)
        self.recent.add(reward)
        mean = self.window.full_mean
        if not added or mean is None:
            return
        self.first = mean if self.first is None else self.first
        self.lowest = mean if self.lowest is None else min(self.lowest, mean)
        if self.best is None or mean > self.best:
            self.best = mean
            self.floor = self.lowest
        share = self.rules.collapse_share
        limit = self._above_zero(share)
        if limit is not None and mean < limit:
            self.low_since = step if self.low == 0 else self.low_since
            self.low += 1
            return
        end = self._above_zero(share + self.RISE)
        if not self.stands() or end is None or mean > end:
            self.low = 0

    def waits_for(self, counts: Mapping[str, int]) -> str | None:
        few = too_few("reward/mean", len(self.window.values), self.window.size)
        if few is None and self._above_zero(self.rules.collapse_share) is None:
            return "there has been no reward to lose yet"
        return few

    @property
    def zero(self) -> float:
        """What counts as no reward: 0, or where rewards are negative the level that the run rose from. A run
        whose rewards were below 0 from the start, and did not rise, has lost them at 1 / `collapse_share`
        times its best, as one with positive rewards at `collapse_share` times it."""
        best = self.best or 0.0
        share = self.rules.collapse_share
        return min(0.0, self.floor, best * (1 + share) / share)

    def _above_zero(self, share: float) -> float | None:
        """A share of the way up to the best mean. None where there is no reward to lose, or none that its
        noise can be told from: negative rewards may have any size."""
        way = (self.best or 0.0) - self.zero
        if way < self.rules.reward_floor:
            return None
        below = self.zero < 0 or min(self.recent.values) < 0
        if below and way < self.rules.baseline_mads * self.recent.noise:
            return None
        return self.zero + share * way

    @property
    def reward_holds(self) -> bool:
        """Reward is near its best, and above what it was at first."""
        mean = self.window.full_mean
        if mean is None or self.best is None or self.first is None:
            return False
        below = (1 - self.rules.hold_share) * abs(self.best)
        return mean >= self.best - below and mean > self.first

    def stands(self) -> bool:
        return self.low >= self.rules.reward_window

    def describe(self, step: int) -> Alarm:
        share = self.rules.collapse_share
        best = self.best or 0.0
        value = self.window.mean
        way = f"{share:.0%} of its best, {best:.3f}"
        if self.zero < 0:
            way = f"{share:.0%} of the way from {self.zero:.3f} to its best, {best:.3f}"
        seen = f"mean reward {value:.3f} is under {way}, for {self.low} steps"
        return self.raised(step, "reward/mean", self.low_since, seen, value, self._above_zero(share))

    def state(self) -> dict[str, Any]:
        return {
            "reward": self.window.values,
            "best_reward": self.best,
            "first_reward": self.first,
            "lowest_reward": self.lowest,
            "floor_reward": self.floor,
            "recent_rewards": self.recent.values,
            "low_reward": self.low,
            "low_since": self.low_since,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.window.values = list(state["reward"])
        self.best = state["best_reward"]
        self.first = state["first_reward"]
        self.lowest = state.get("lowest_reward", self.first)  # earlier versions kept neither
        self.floor = state.get("floor_reward", self.first or 0.0)
        self.recent.values = list(state.get("recent_rewards", []))
        self.low = state["low_reward"]
        self.low_since = state["low_since"]
