"""`reward_gap`: the reward in training holds or rises while the held-out score falls, or calls answers right
that are no exact match."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.likelihood.monitor.alarms import Alarm
from services.likelihood.monitor.detectors.base import Channel, Metrics, Rising, above, too_few
from services.likelihood.monitor.watch import Baseline, Window, number
from services.settings import MonitorRules

SCORES = ("eval/em_greedy", "eval/em_sampled")
"""The first of them that a step has is its held-out score."""
EVALUATIONS = 2
"""Evaluations running that must show it."""


class RewardGap(Rising):
    rule = "reward_gap"
    reads = (*SCORES, "reward/mean", "reward/right", "reward/em")
    needs = (*SCORES, "reward/em")
    advice = (
        "What the reward pays for is no longer what you want. Compare trajectories of training and "
        "evaluation since step {since}: a reward that can be had without the answer, or questions learnt by "
        "heart. Use the checkpoint of the best held-out score."
    )

    def __init__(self, rules: MonitorRules):
        super().__init__(rules)
        self.reward = Window(rules.reward_window)
        self.best: float | None = None
        """The best held-out score."""
        self.reward_then: float | None = None
        """The mean reward when it was reached."""
        self.count = 0
        self.since: int | None = None
        self.score: float | None = None
        words = (
            "the reward calls {value:.0%} more of the answers right than the exact match and its own gain "
        )
        words += "explain (mean of {window}; usually {usual:.0%}; alarm at {threshold:.0%})"
        # Both are shares of trajectories, so that the reward may have any scale.
        self.paid = Channel("reward/em", words, rules, above(rules.gap_drop, rules))
        self.match = Baseline(rules.warmup_steps, rules.baseline_steps)
        self.matches = Window(rules.lag_window)

    def read(self, step: int, metrics: Metrics) -> None:
        self._compare(step, number(metrics.get("reward/right")), number(metrics.get("reward/em")))
        self.reward.add(number(metrics.get("reward/mean")))
        score = next((s for name in SCORES if (s := number(metrics.get(name))) is not None), None)
        mean = self.reward.full_mean
        if score is None or mean is None:
            return
        self.score = score
        if self.best is None or self.reward_then is None or score >= self.best:
            self.best = score
            self.reward_then = mean
            self.count = 0
        elif score < self.best - self.rules.gap_drop and mean >= self.reward_then:
            self.since = step if self.count == 0 else self.since
            self.count += 1
        else:
            self.count = 0

    def _compare(self, step: int, right: float | None, match: float | None) -> None:
        """A judge that accepts more wordings than exact match gains more than it, as both rise: what the
        exact match has gained itself is taken off the difference."""
        if right is None or match is None:
            return
        self.matches.add(match)
        level = self.matches.mean or 0.0
        gained = max(0.0, level - self.match.median) if self.match.ready else 0.0
        self.match.add(match, may_renew=not self.paid.watch.active)
        self.paid.update(step, right - match - gained)

    def waits_for(self, counts: Mapping[str, int]) -> str | None:
        """One of its two ways is enough."""
        scores = max(counts.get(name, 0) for name in SCORES)
        by_score = too_few("the held-out score", scores, EVALUATIONS + 1)
        if by_score is None or self.paid.baseline.seen == 0:
            return by_score
        by_match = self.paid.doubt()
        return by_match and f"{by_score}; {by_match}"

    def stands(self) -> bool:
        return self.count >= EVALUATIONS or self.paid.watch.active

    def describe(self, step: int) -> Alarm:
        if self.count < EVALUATIONS:
            _, limit = self.paid.judged_by()
            since = self.paid.watch.since
            value = self.paid.values.mean
            return self.raised(step, self.paid.metric, since, self.paid.seen(), value, limit)
        best = self.best or 0.0
        seen = (
            f"the held-out score is {self.score:.3f}, {best:.3f} at its best, while the mean reward went "
            f"from {self.reward_then:.3f} to {self.reward.mean:.3f}"
        )
        return self.raised(step, SCORES[0], self.since, seen, self.score, best - self.rules.gap_drop)

    def state(self) -> dict[str, Any]:
        kept = ("best", "reward_then", "count", "since", "score")
        own = {k: getattr(self, k) for k in kept}
        return {"reward": self.reward.values, **own, **self._paid_state()}

    def _paid_state(self) -> dict[str, Any]:
        return {
            "paid": self.paid.state_dict(),
            "match": self.match.state_dict(),
            "matches": self.matches.values,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.reward.values = list(state["reward"])
        self.best = state["best"]
        self.reward_then = state["reward_then"]
        self.count = state["count"]
        self.since = state["since"]
        self.score = state["score"]
        if "paid" in state:  # earlier versions did not compare with the exact match
            self.paid.load_state_dict(state["paid"])
            self.match.load_state_dict(state["match"])
            self.matches.values = list(state["matches"])
