"""`entropy_high`: the policy turns into noise."""

from __future__ import annotations

from services.likelihood.monitor.detectors.base import Channel, FromBaseline, above


class EntropyHigh(FromBaseline):
    rule = "entropy_high"
    reads = ("entropy",)
    advice = (
        "The policy forgets what it wrote: read trajectories from step {since} on for broken words and tags. "
        "Lower learner.lr or algorithm.entropy, add algorithm.kl, or go back to a checkpoint from before."
    )

    def made_channels(self) -> list[Channel]:
        r = self.rules
        words = (
            "entropy is {value:.2f} nats (mean of {window}; usually {usual:.3g}; alarm at {threshold:.3g})"
        )
        return [Channel("entropy", words, r, above(r.entropy_rise_alarm_nats, r, ratio=2.0))]
