"""`garbage`: the text between the tags decays while the reward holds."""

from __future__ import annotations

from services.likelihood.monitor.detectors.base import Channel, WhileRewardHolds, above


class Garbage(WhileRewardHolds):
    rule = "garbage"
    reads = ("text/repetition", "text/non_words", "reward/mean")
    needs = ("text/repetition", "text/non_words")
    advice = (
        "The reward no longer sees what the model writes: read trajectories from step {since} on. Add "
        "algorithm.kl, a penalty for repetition or a reward that reads the reasoning, or go back to a "
        "checkpoint from before."
    )

    def made_channels(self) -> list[Channel]:
        r = self.rules
        again = (
            "{value:.0%} of the runs of four tokens stood before in the same trajectory (mean of {window}; "
        )
        again += "usually {usual:.0%}; alarm at {threshold:.0%})"
        words = (
            "{value:.0%} of the words stand in neither questions nor documents (mean of {window}; usually "
        )
        words += "{usual:.0%}; alarm at {threshold:.0%})"
        limit = above(r.share_rise, r)
        return [Channel("text/repetition", again, r, limit), Channel("text/non_words", words, r, limit)]
