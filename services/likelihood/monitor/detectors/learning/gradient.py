"""`gradient`: the gradient norm is many times its usual level while the reward holds."""

from __future__ import annotations

from services.likelihood.monitor.detectors.base import Channel, WhileRewardHolds, above


class Gradient(WhileRewardHolds):
    rule = "gradient"
    reads = ("grad_norm", "grad_norm/max", "reward/mean")
    needs = ("grad_norm", "grad_norm/max")
    advice = (
        "The loss is about to break, or breaks now. Look at ratio/max, mismatch/abs_logp and the longest "
        "trajectories of the steps since {since}; lower learner.lr or learner.grad_clip, or go back to a "
        "checkpoint from before."
    )

    def made_channels(self) -> list[Channel]:
        r = self.rules
        words = "the gradient norm is {value:.3g} (mean of {window}; usually {usual:.3g}; alarm at "
        words += "{threshold:.3g})"
        largest = f"the largest of the step: {words}"
        limit = above(0.0, r, ratio=r.gradient_ratio)
        return [
            Channel("grad_norm", words, r, limit),
            Channel("grad_norm/max", largest, r, limit),
        ]
