"""`length`: answers grow or shrink to a multiple of their usual length."""

from __future__ import annotations

from services.likelihood.monitor.detectors.base import Channel, FromBaseline, above


class Length(FromBaseline):
    rule = "length"
    reads = ("rollout/length",)
    advice = (
        "Read trajectories from step {since} on. Longer ones may be loops or a reward for length; shorter "
        "ones a guess without reasoning. Where long reasoning is what you train for, raise "
        "monitor.rules.length_ratio."
    )

    def made_channels(self) -> list[Channel]:
        r = self.rules
        words = "{value:.0f} tokens per trajectory (mean of {window}; usually {usual:.0f}; alarm at "
        words += "{threshold:.0f})"
        return [
            Channel("rollout/length", words, r, above(0.0, r, ratio=r.length_ratio)),
            Channel("rollout/length", words, r, lambda b: b.median / r.length_ratio),
        ]
