"""`no_reward`: not one trajectory of the step has a reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.likelihood.monitor.alarms import Alarm
from services.likelihood.monitor.detectors.base import Metrics, Rising
from services.likelihood.monitor.watch import Streak, number
from services.settings import MonitorRules


def unrewarded(metrics: Metrics) -> bool:
    """None of the step's trajectories has a reward. A trainer that posts no rewards at all does not say
    so."""
    missing = (number(metrics.get("reward/missing")) or 0.0) > 0
    return number(metrics.get("reward/mean")) is None and ("reward/mean" in metrics or missing)


class NoReward(Rising):
    rule = "no_reward"
    reads = ("reward/mean", "reward/missing")
    advice = (
        "Nothing is learnt from such a step, and nothing is wrong with the model: ask whether what the "
        "reward function calls (a judge, a service) is up, and what it answers. The run goes on; a reward "
        "that comes back clears this."
    )

    def __init__(self, rules: MonitorRules):
        super().__init__(rules)
        self.streak = Streak()

    def read(self, step: int, metrics: Metrics) -> None:
        self.streak.update(unrewarded(metrics))

    def stands(self) -> bool:
        return self.streak.count > 0

    def describe(self, step: int) -> Alarm:
        since = step - self.streak.count + 1
        return self.raised(step, "reward/missing", since, "no trajectory of the step has a reward")

    def state(self) -> dict[str, Any]:
        return {"count": self.streak.count}

    def load(self, state: Mapping[str, Any]) -> None:
        self.streak.count = state["count"]
