"""`leak`: sampler and learner cannot produce the same tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.likelihood.monitor.alarms import Alarm
from services.likelihood.monitor.detectors.base import Metrics, Rising, too_few
from services.likelihood.monitor.watch import Watch, number
from services.settings import MonitorRules


class Leak(Rising):
    rule = "leak"
    reads = ("leak/logp_entropy",)
    advice = (
        "Look for what keeps tokens from being sampled but not from being learnt: padded vocabulary rows, "
        "bad_words, min_tokens, allowed ids, top-k, top-p, min-p. Mask them in the learner too, or switch "
        "them off."
    )

    def __init__(self, rules: MonitorRules):
        super().__init__(rules)
        self.watch = Watch(
            rules.leak_nats,
            0.7 * rules.leak_nats,
            window=rules.lag_window,
            patience=rules.patience,
            leave_patience=rules.clear_patience,
        )

    def read(self, step: int, metrics: Metrics) -> None:
        self.watch.update(step, number(metrics.get("leak/logp_entropy")))

    def waits_for(self, counts: Mapping[str, int]) -> str | None:
        window = self.watch.window
        return too_few("leak/logp_entropy", len(window.values), window.size)

    def stands(self) -> bool:
        return self.watch.active

    def describe(self, step: int) -> Alarm:
        w = self.watch
        seen = (
            f"the surprise of sampled tokens and the learner's entropy differ by {w.mean:.3f} nats "
            f"(mean of {self.rules.lag_window}; alarm at {w.enter:g})"
        )
        return self.raised(step, "leak/logp_entropy", w.since, seen, w.mean, w.enter)

    def state(self) -> dict[str, Any]:
        return {"watch": self.watch.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        self.watch.load_state_dict(state["watch"])
