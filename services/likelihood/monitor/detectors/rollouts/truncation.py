"""`truncation`: trajectories are cut off at the limit of tokens."""

from __future__ import annotations

from services.likelihood.monitor.detectors.base import Channel, FromBaseline, above


class Truncation(FromBaseline):
    rule = "truncation"
    reads = ("rollout/truncated",)
    advice = (
        "Cut trajectories earn nothing, whatever they were about to say. Raise rollout.max_response_tokens, "
        "or give a penalty for length before the limit (algorithm.overlong); read a few from step {since} on "
        "for loops."
    )

    def made_channels(self) -> list[Channel]:
        r = self.rules
        words = (
            "{value:.0%} of the trajectories are cut off (mean of {window}; usually {usual:.0%}; alarm at "
        )
        words += "{threshold:.0%})"
        return [Channel("rollout/truncated", words, r, above(r.share_rise, r))]
