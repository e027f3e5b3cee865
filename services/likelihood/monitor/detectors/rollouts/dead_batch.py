"""`dead_batch`: no group has two different rewards, and the mean reward is about 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.likelihood.monitor.alarms import Alarm
from services.likelihood.monitor.detectors.base import Metrics, Rising, too_few
from services.likelihood.monitor.detectors.rollouts.no_reward import unrewarded
from services.likelihood.monitor.watch import Streak, Window, number
from services.settings import MonitorRules


class DeadBatch(Rising):
    rule = "dead_batch"
    reads = ("groups/zero_variance", "reward/mean", "policy/clip_fraction")
    needs = ("groups/zero_variance",)
    advice = (
        "Nothing is learnt. Read some trajectories: a model that does not write the tags needs a warm start "
        "(unspiral warm-start). Look at the reward function and the data; after a fall, resume from an "
        "earlier checkpoint."
    )

    def __init__(self, rules: MonitorRules):
        super().__init__(rules)
        self.window = Window(rules.reward_window)
        self.streak = Streak()

    @property
    def poor(self) -> bool:
        """There is hardly a reward: groups without two different ones are then all wrong, not all right."""
        mean = self.window.full_mean
        return mean is not None and mean <= self.rules.reward_floor

    def read(self, step: int, metrics: Metrics) -> None:
        self.window.add(number(metrics.get("reward/mean")))
        equal = number(metrics.get("groups/zero_variance"))
        if equal is None or unrewarded(metrics):
            return
        clipped = number(metrics.get("policy/clip_fraction")) or 0.0
        useless = self.poor or clipped >= self.rules.dead_clip_fraction
        self.streak.update(equal == 1.0 and useless)

    def waits_for(self, counts: Mapping[str, int]) -> str | None:
        name = "groups/zero_variance"
        few = too_few(name, counts[name], self.rules.patience)
        # The clipped ratios are the other way to see it.
        if counts.get("policy/clip_fraction"):
            return few
        return few or too_few("reward/mean", len(self.window.values), self.window.size)

    def stands(self) -> bool:
        return self.streak.count >= self.rules.patience

    def describe(self, step: int) -> Alarm:
        count = self.streak.count
        why = f"at least {self.rules.dead_clip_fraction:.0%} of ratios are clipped"
        if self.poor:
            why = f"mean reward is {self.window.mean:.3f}"
        seen = f"no group has two different rewards and {why}, {count} steps running"
        return self.raised(step, "groups/zero_variance", step - count + 1, seen)

    def state(self) -> dict[str, Any]:
        return {"reward": self.window.values, "count": self.streak.count}

    def load(self, state: Mapping[str, Any]) -> None:
        self.window.values = list(state["reward"])
        self.streak.count = state["count"]
