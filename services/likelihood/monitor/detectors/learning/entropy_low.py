"""`entropy_low`: the policy has become all but deterministic."""

from __future__ import annotations

from services.likelihood.monitor.detectors.base import Channel, FromBaseline
from services.likelihood.monitor.watch import Baseline


class EntropyLow(FromBaseline):
    rule = "entropy_low"
    reads = ("entropy",)
    advice = (
        "Samples of a prompt become equal, groups lose their variance and nothing is learnt any more. Raise "
        "algorithm.clip_high or algorithm.entropy, lower learner.lr, and check that rollout.temperature is "
        "1; a checkpoint from before step {since} still explores."
    )

    def made_channels(self) -> list[Channel]:
        r = self.rules
        words = (
            "entropy is {value:.4f} nats (mean of {window}; usually {usual:.3g}; alarm at {threshold:.3g})"
        )
        return [Channel("entropy", words, r, self.threshold)]

    def threshold(self, b: Baseline) -> float | None:
        """None where entropy was near the floor from the start: the rule is about a fall."""
        floor = self.rules.entropy_floor_nats
        return max(floor, self.rules.entropy_low_share * b.median) if b.median > 2 * floor else None
