"""`likelihood`: right answers of earlier steps lose likelihood."""

from __future__ import annotations

from collections.abc import Mapping

from services.likelihood.monitor.alarms import Alarm, Confidence, Phase
from services.likelihood.monitor.detectors.base import Metrics, Rising
from services.likelihood.monitor.signs import READS, Signs
from services.settings import MonitorRules


class OfTheFall(Rising):
    """A rule about falling likelihood. It reads `Signs`, which the monitor has brought up to the step, and
    the phase that follows from them."""

    def __init__(self, rules: MonitorRules, signs: Signs):
        super().__init__(rules)
        self.signs = signs
        self.phase: Phase = "unknown"

    def read(self, step: int, metrics: Metrics) -> None:
        """Nothing of its own: see `Signs.update`."""

    def waits_for(self, counts: Mapping[str, int]) -> str | None:
        return self.signs.waits_for()

    @property
    def sinking(self) -> bool:
        """An alarm once raised stands through the fall and the collapse."""
        return self.alarm is not None and (self.signs.falling or self.phase == "collapsed")

    def confidence(self) -> Confidence:
        """High: two independent signs agree, or one is far past its threshold. Low: the share of falling
        answers alone, without probes."""
        lag = self.signs.watches["lag"]
        far = lag.active and lag.mean is not None and lag.mean < 1.5 * self.rules.lag_nats
        if far or self.signs.watches["plunge"].active or len(self.signs.in_words()) > 1:
            return "high"
        return "medium" if lag.active or self.signs.watches["fixed"].active else "low"


class Likelihood(OfTheFall):
    rule = "likelihood"
    reads = READS
    advice = (
        "Halve learner.lr, or go back to a checkpoint from before step {since}. As a second line switch LLDS "
        "on, or raise algorithm.llds.lambda."
    )

    def stands(self) -> bool:
        return self.signs.falling or self.sinking

    def describe(self, step: int) -> Alarm:
        shown = self.signs.in_words()
        metric = next(iter(shown), "probe/lag")
        watch = self.signs.watch_of(metric)
        return self.raised(step, metric, watch.since, "; ".join(shown.values()), watch.mean, watch.enter)
