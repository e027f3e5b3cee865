"""`silent_llds`: LLDS is switched on, and holds no token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.likelihood.monitor.alarms import Alarm, Confidence
from services.likelihood.monitor.detectors.base import Metrics, Rising, too_few
from services.likelihood.monitor.watch import Streak, number
from services.settings import MonitorRules


class SilentLLDS(Rising):
    rule = "silent_llds"
    reads = (
        "llds/active_tokens",
        "llds/lambda",
        "llds/min_drop",
        "llds/largest_drop",
        "learner/optimiser_steps",
        "groups/zero_variance",
    )
    needs = ("llds/active_tokens",)
    advice = (
        "The run is trained as if LLDS were off. LLDS acts from the second optimiser step of a batch on: set "
        "learner.minibatches_per_batch or learner.epochs above 1, algorithm.llds.min_drop below the usual "
        "drop, and see that some groups have two different rewards."
    )

    def __init__(self, rules: MonitorRules):
        super().__init__(rules)
        self.streak = Streak()
        self.why = ""

    def read(self, step: int, metrics: Metrics) -> None:
        active = number(metrics.get("llds/active_tokens"))
        # A trainer that does not say lambda posts active tokens where LLDS is on.
        switched_on = (number(metrics.get("llds/lambda")) or 0.0) > 0 or "llds/lambda" not in metrics
        steps = number(metrics.get("learner/optimiser_steps"))
        if active is None or steps == 0:
            return  # no step was due
        self.streak.update(switched_on and active == 0)
        if self.streak.count:
            self.why = self.reason(metrics, steps)

    @staticmethod
    def reason(metrics: Metrics, steps: float | None) -> str:
        """Why no token is held, as far as the metrics tell."""
        if steps is not None and steps <= 1:
            return "there is one optimiser step per batch, and before the first nothing has dropped"
        if number(metrics.get("groups/zero_variance")) == 1.0:
            return "all advantages are 0, so that the weights hardly move"
        least = number(metrics.get("llds/min_drop")) or 0.0
        largest = number(metrics.get("llds/largest_drop"))
        if least > 0 and (largest is None or 0 < largest <= least):
            return f"every drop is below min_drop, {least:g} nats"
        return "no preserved answer loses likelihood, or no answer is preserved"

    def waits_for(self, counts: Mapping[str, int]) -> str | None:
        return too_few("llds/active_tokens", counts["llds/active_tokens"], self.rules.silent_steps)

    def stands(self) -> bool:
        return self.streak.count >= self.rules.silent_steps

    def confidence(self) -> Confidence:
        return "medium" if self.why.startswith("no preserved") else "high"

    def describe(self, step: int) -> Alarm:
        count = self.streak.count
        seen = f"LLDS has held no token for {count} steps running: {self.why}"
        return self.raised(step, "llds/active_tokens", step - count + 1, seen, 0.0)

    def state(self) -> dict[str, Any]:
        return {"count": self.streak.count, "why": self.why}

    def load(self, state: Mapping[str, Any]) -> None:
        self.streak.count = state["count"]
        self.why = state["why"]
