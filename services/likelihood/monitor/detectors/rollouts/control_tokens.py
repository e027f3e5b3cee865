"""`control_tokens`: the tag tokens become unlikely."""

from __future__ import annotations

from services.likelihood.monitor.detectors.base import Channel, FromBaseline, below


class ControlTokens(FromBaseline):
    rule = "control_tokens"
    reads = ("logp/control", "probe/control")
    advice = (
        "The form goes before the content does: look at rollout/valid, at how the tags are tokenized, and at "
        "whether wrong trajectories push the tags down (algorithm.llds holds them). Lower learner.lr or go "
        "back to a checkpoint from before step {since}."
    )

    def made_channels(self) -> list[Channel]:
        r = self.rules
        words = (
            "have a log-prob of {value:.2f} nats (mean of {window}; usually {usual:.3g}; alarm at "
            "{threshold:.3g})"
        )
        limit = below(r.control_drop_nats, r)
        return [
            Channel("logp/control", f"tag tokens {words}", r, limit),
            Channel("probe/control", f"the tag tokens of frozen right answers {words}", r, limit),
        ]
