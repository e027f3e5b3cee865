"""`interaction`: the agent stops searching, or searches until it has no turn left."""

from __future__ import annotations

from services.likelihood.monitor.detectors.base import Channel, FromBaseline, Metrics, above
from services.likelihood.monitor.watch import Baseline, number

LEAST_SEARCHES = 0.3
MORE_SEARCHES = 1.4


class Interaction(FromBaseline):
    rule = "interaction"
    reads = ("rollout/searches", "rollout/at_turn_limit")
    advice = (
        "Read trajectories from step {since} on. An agent that no longer searches guesses, or has learnt the "
        "answers by heart: look at the reward for a way to be paid without a search. One that runs to "
        "rollout.max_turns never answers: look at what the retriever returns, and at the reward for "
        "searching."
    )

    def made_channels(self) -> list[Channel]:
        r = self.rules
        few = "{value:.2f} searches per trajectory (mean of {window}; usually {usual:.3g}; alarm at "
        few += "{threshold:.3g})"
        cut = "{value:.0%} of the trajectories use up their turns (mean of {window}; usually {usual:.0%})"
        return [
            Channel("rollout/searches", few, r, self.hardly_any),
            Channel("rollout/searches", few, r, self.very_many),
            Channel("rollout/at_turn_limit", cut, r, above(r.share_rise, r)),
        ]

    def read(self, step: int, metrics: Metrics) -> None:
        few, many, cut = self.channels
        searches = number(metrics.get("rollout/searches"))
        counted = number(metrics.get("rollout/at_turn_limit"))
        few.update(step, searches)
        many.update(step, searches, judged=counted is None)
        cut.update(step, counted)

    def hardly_any(self, b: Baseline) -> float | None:
        """An agent that never did search has nothing to lose."""
        return self.rules.searches_low_share * b.median if b.median >= LEAST_SEARCHES else None

    def very_many(self, b: Baseline) -> float:
        """For trainers that do not count the trajectories that use up their turns: a rise by a good part of
        the usual number, and by more than one search, stands for it."""
        return max(self.rules.searches_high_ratio * b.median, b.median + MORE_SEARCHES)
