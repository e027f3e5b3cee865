"""`degenerate_groups`: most groups have one reward throughout, and not because all answers are right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.likelihood.monitor.detectors.base import Channel, FromBaseline, Metrics
from services.likelihood.monitor.watch import Baseline, Window, number
from services.settings import MonitorRules

RISE = 0.15
"""The share must have risen so much above its usual level."""
LARGEST = 0.99


class DegenerateGroups(FromBaseline):
    rule = "degenerate_groups"
    reads = ("groups/zero_variance", "reward/right", "reward/mean")
    needs = ("groups/zero_variance",)
    advice = (
        "Only groups with two different rewards teach. The questions have become too hard for this policy, "
        "or its samples are all alike (look at entropy): use algorithm.dynamic_sampling, larger groups, "
        "other questions, or a checkpoint from before step {since}."
    )

    def __init__(self, rules: MonitorRules):
        super().__init__(rules)
        self.equal = Window(rules.lag_window)
        self.right = Window(rules.lag_window)

    def made_channels(self) -> list[Channel]:
        words = (
            "{value:.0%} of the groups have one reward throughout (mean of {window}; usually {usual:.0%}; "
        )
        words += "alarm at {threshold:.0%}), and not all of them are right"
        return [Channel("groups/zero_variance", words, self.rules, self.threshold)]

    def threshold(self, b: Baseline) -> float | None:
        """None where most groups were so from the start: no rise can be told from noise."""
        limit = max(self.rules.degenerate_share, b.median + RISE)
        return limit if limit <= LARGEST else None

    def read(self, step: int, metrics: Metrics) -> None:
        equal = number(metrics.get("groups/zero_variance"))
        right = number(metrics.get("reward/right"))
        if right is None:
            right = number(metrics.get("reward/mean"))
        self.equal.add(equal)
        self.right.add(right)
        self.channels[0].update(step, equal, judged=self.all_wrong is not None, excused=self.excused)

    @property
    def all_wrong(self) -> float | None:
        """Least share of groups that are wrong throughout. Those that are right throughout are at most as
        many as the right answers."""
        if self.equal.mean is None or self.right.mean is None:
            return None
        return self.equal.mean - self.right.mean

    @property
    def excused(self) -> bool:
        """Groups are equal because they are right."""
        return self.all_wrong is not None and self.all_wrong < self.rules.degenerate_wrong

    def state(self) -> dict[str, Any]:
        return {**super().state(), "equal": self.equal.values, "right": self.right.values}

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self.equal.values = list(state["equal"])
        self.right.values = list(state["right"])
