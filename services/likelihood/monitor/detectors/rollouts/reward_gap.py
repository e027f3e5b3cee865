"""`reward_gap`: the reward in training holds or rises while the held-out score falls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.likelihood.monitor.alarms import Alarm
from services.likelihood.monitor.detectors.base import Metrics, Rising
from services.likelihood.monitor.watch import Window, number
from services.settings import MonitorRules

SCORES = ("eval/em_greedy", "eval/em_sampled")
"""The first of them that a step has is its held-out score."""
EVALUATIONS = 2
"""Evaluations running that must show it."""


class RewardGap(Rising):
    rule = "reward_gap"
    reads = (*SCORES, "reward/mean")
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

    def read(self, step: int, metrics: Metrics) -> None:
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

    def stands(self) -> bool:
        return self.count >= EVALUATIONS

    def describe(self, step: int) -> Alarm:
        best = self.best or 0.0
        seen = (
            f"the held-out score is {self.score:.3f}, {best:.3f} at its best, while the mean reward went "
            f"from {self.reward_then:.3f} to {self.reward.mean:.3f}"
        )
        return self.raised(step, SCORES[0], self.since, seen, self.score, best - self.rules.gap_drop)

    def state(self) -> dict[str, Any]:
        kept = ("best", "reward_then", "count", "since", "score")
        return {"reward": self.reward.values, **{k: getattr(self, k) for k in kept}}

    def load(self, state: Mapping[str, Any]) -> None:
        self.reward.values = list(state["reward"])
        self.best = state["best"]
        self.reward_then = state["reward_then"]
        self.count = state["count"]
        self.since = state["since"]
        self.score = state["score"]
