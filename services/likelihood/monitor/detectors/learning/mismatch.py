"""`mismatch`: sampler and learner give the same tokens different log-probs."""

from __future__ import annotations

from services.likelihood.monitor.detectors.base import Channel, FromBaseline, above


class Mismatch(FromBaseline):
    rule = "mismatch"
    reads = ("mismatch/abs_logp", "kl/sampler")
    advice = (
        "The samples are no longer the policy's own. Look at the weight sync (versions, a worker left "
        "behind), at dtypes and attention kernels of the two sides, at rollout.max_staleness, and at an "
        "MoE's routing; algorithm.importance bounds the harm."
    )

    def made_channels(self) -> list[Channel]:
        r = self.rules
        usual = "(mean of {window}; usually {usual:.3g}; alarm at {threshold:.3g})"
        logp = "sampler and learner differ by {value:.3f} nats per token " + usual
        kl = "the KL of sampler and learner is {value:.3f} nats per token " + usual
        limit = above(r.mismatch_nats, r, ratio=2.0)
        return [Channel("mismatch/abs_logp", logp, r, limit), Channel("kl/sampler", kl, r, limit)]
