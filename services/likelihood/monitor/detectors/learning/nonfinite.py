"""`nonfinite`: optimiser steps were due, and had no finite gradient norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.likelihood.monitor.alarms import Alarm
from services.likelihood.monitor.detectors.base import Metrics, Rising, too_few
from services.likelihood.monitor.detectors.rollouts.no_reward import unrewarded
from services.likelihood.monitor.watch import Streak, number
from services.settings import MonitorRules


class Nonfinite(Rising):
    rule = "nonfinite"
    reads = ("grad_norm",)
    advice = (
        "Steps without a finite gradient norm are skipped, so nothing is learnt. Look at ratio/max and "
        "mismatch/abs_logp; lower learner.lr."
    )

    def __init__(self, rules: MonitorRules):
        super().__init__(rules)
        self.streak = Streak()

    def read(self, step: int, metrics: Metrics) -> None:
        # Without the metric, or without any reward, no step was due: neither a good sign nor a bad one.
        if "grad_norm" in metrics and not unrewarded(metrics):
            self.streak.update(number(metrics["grad_norm"]) is None)

    def waits_for(self, counts: Mapping[str, int]) -> str | None:
        return too_few("grad_norm", counts["grad_norm"], self.rules.nonfinite_steps)

    def stands(self) -> bool:
        return self.streak.count >= self.rules.nonfinite_steps

    def describe(self, step: int) -> Alarm:
        count = self.streak.count
        seen = f"the gradient norm is not finite, {count} steps running"
        return self.raised(step, "grad_norm", step - count + 1, seen)

    def state(self) -> dict[str, Any]:
        return {"count": self.streak.count}

    def load(self, state: Mapping[str, Any]) -> None:
        self.streak.count = state["count"]
