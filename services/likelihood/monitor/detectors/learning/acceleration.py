"""`acceleration`: the fall of likelihood is steep, or further signs agree with it."""

from __future__ import annotations

from services.likelihood.monitor.alarms import Alarm
from services.likelihood.monitor.detectors.learning.likelihood import Likelihood, OfTheFall
from services.likelihood.monitor.signs import LOUD, READS, Signs
from services.settings import MonitorRules


class Acceleration(OfTheFall):
    rule = "acceleration"
    reads = READS + LOUD
    needs = READS
    advice = (
        "Stop, or roll back to a checkpoint from before step {since}, and lower learner.lr: from here a fall "
        "usually ends in collapse."
    )

    def __init__(self, rules: MonitorRules, signs: Signs, likelihood: Likelihood):
        super().__init__(rules, signs)
        self.likelihood = likelihood

    def stands(self) -> bool:
        return self.phase == "acceleration" or self.sinking

    def describe(self, step: int) -> Alarm:
        shown = self.signs.in_words()
        metric = next(iter(shown), "probe/lag")
        watch = self.signs.watch_of(metric)
        started = self.likelihood.alarm
        since = started.since if started else watch.since
        seen = f"the fall is large, or further signs agree: {'; '.join(shown.values())}"
        if started and started.step == step:
            seen = "the fall is large already, or further signs agree"
        return self.raised(step, metric, since, seen, watch.mean, self.rules.acceleration_nats)
