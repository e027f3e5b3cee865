"""`validity`: actions lose their form, or trajectories end without an answer."""

from __future__ import annotations

from services.likelihood.monitor.detectors.base import Channel, FromBaseline, Metrics, below
from services.likelihood.monitor.watch import number


class Validity(FromBaseline):
    rule = "validity"
    reads = ("rollout/valid", "rollout/finished")
    advice = (
        "Read trajectories from step {since} on: tags are left open, or text stands outside of them. Look at "
        "the tag tokens in the vocabulary, at rollout.template, and at whether the reward asks for the form; "
        "lower learner.lr or go back to a checkpoint from before."
    )

    def made_channels(self) -> list[Channel]:
        r = self.rules
        valid = "{value:.0%} of the actions are valid (mean of {window}; usually {usual:.0%}; alarm at "
        valid += "{threshold:.0%})"
        ended = "{value:.0%} of the trajectories end with an answer (mean of {window}; usually {usual:.0%})"
        return [
            Channel("rollout/valid", valid, r, below(r.share_rise, r)),
            Channel("rollout/finished", ended, r, below(r.share_rise, r)),
        ]

    def read(self, step: int, metrics: Metrics) -> None:
        # Where the reasons of an end are counted, `truncation` and `interaction` say more about it.
        counted = "rollout/truncated" in metrics and "rollout/at_turn_limit" in metrics
        for channel in self.channels:
            judged = channel.metric == "rollout/valid" or not counted
            channel.update(step, number(metrics.get(channel.metric)), judged=judged)
