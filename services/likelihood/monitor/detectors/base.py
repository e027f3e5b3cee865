"""What a detector is, and the two kinds that most of them are built on.

A detector is pure: no clock, no I/O, so that it replays over any recorded run. It reads some metrics of each
step by name, keeps a state that saves as plain JSON, and says whether its alarm stands.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

from services.common.counting import counted
from services.likelihood.monitor.alarms import CONFIDENCES, Alarm, Confidence, Rule
from services.likelihood.monitor.watch import Baseline, Watch, Window, number
from services.settings import MonitorRules

Metrics = Mapping[str, Any]
CAP = 2.0
"""Most that one value counts, in distances from baseline to threshold: one wild value makes no alarm."""
CREEP = 2.0
"""Distances to its limit that a metric may get from its first usual level, however slowly."""
LEAVE = 0.7
"""An alarm ends below this share of the distance from baseline to threshold."""


class Detector(Protocol):
    """One rule of the monitor."""

    rule: ClassVar[Rule]
    reads: ClassVar[tuple[str, ...]]
    """Names of the metrics that it judges by (docs/monitor.md)."""
    needs: ClassVar[tuple[str, ...]]
    """Those of which it must have seen one at least to say anything; empty: any that it reads."""
    advice: ClassVar[str]
    """What to do; `{since}` becomes the first step at which the sign was seen."""
    alarm: Alarm | None
    """The alarm that stands."""

    def update(self, step: int, metrics: Metrics) -> Alarm | None:
        """The alarm that stands after this step, or None. Metrics that are missing or None are passed
        over."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Rising(ABC):
    """Keeps one alarm while `stands`. Subclasses read the step, and describe what they saw."""

    rule: ClassVar[Rule]
    reads: ClassVar[tuple[str, ...]]
    needs: ClassVar[tuple[str, ...]] = ()
    advice: ClassVar[str]

    def __init__(self, rules: MonitorRules):
        self.rules = rules
        self.alarm: Alarm | None = None

    def undecided(self, counts: Mapping[str, int]) -> str | None:
        """Why the rule cannot judge the run yet; None once it can, and while its alarm stands. counts: values
        that there were of each metric."""
        if self.alarm is not None:
            return None
        wanted = self.needs or self.reads
        if not any(counts.get(name) for name in wanted):
            return f"no {' or '.join(wanted)} recorded"
        return self.waits_for(counts)

    def waits_for(self, counts: Mapping[str, int]) -> str | None:
        """The same, of a rule that has seen what it needs; None: one value is enough."""
        return None

    def update(self, step: int, metrics: Metrics) -> Alarm | None:
        self.read(step, metrics)
        if not self.stands():
            self.alarm = None
        elif self.alarm is None:
            self.alarm = self.describe(step)
        else:
            # Confidence only grows while an alarm stands: it is of the worst that was seen.
            self.alarm.confidence = max(self.alarm.confidence, self.confidence(), key=CONFIDENCES.index)
        return self.alarm

    @abstractmethod
    def read(self, step: int, metrics: Metrics) -> None:
        """Take in one step."""

    @abstractmethod
    def stands(self) -> bool:
        """Whether the rule is true now."""

    @abstractmethod
    def describe(self, step: int) -> Alarm:
        """The alarm of a rule that has just become true."""

    def confidence(self) -> Confidence:
        return "high"

    def raised(
        self,
        step: int,
        metric: str,
        since: int | None,
        seen: str,
        value: float | None = None,
        threshold: float | None = None,
    ) -> Alarm:
        """An alarm of this rule. The monitor fills in the phase."""
        begun = step if since is None else since
        return Alarm(
            rule=self.rule,
            metric=metric,
            step=step,
            since=begun,
            phase="unknown",
            seen=seen,
            confidence=self.confidence(),
            advice=self.advice.format(since=begun),
            value=value,
            threshold=threshold,
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"alarm": self.alarm.as_dict() if self.alarm else None, **self.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.alarm = Alarm.of(state["alarm"]) if state["alarm"] else None
        self.load(state)

    def state(self) -> dict[str, Any]:
        """What the rule keeps besides its alarm."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:  # noqa: B027  (a rule may keep its alarm alone)
        """Take up what `state` gave."""


class Channel:
    """One metric against a threshold that follows from its own baseline.

    threshold: baseline -> the value at which the rule is true (above or below the baseline's median), or None
    where the rule says nothing about a run of such a baseline. The mean of `lag_window` values must be past
    it for `patience` steps running; the alarm ends once it is back within LEAVE of the way for
    `clear_patience`.
    """

    def __init__(
        self,
        metric: str,
        words: str,
        rules: MonitorRules,
        threshold: Callable[[Baseline], float | None],
    ):
        """words: what is seen, with `{value}`, `{threshold}` and `{usual}`."""
        self.metric = metric
        self.words = words
        self.threshold = threshold
        self.rules = rules
        self.baseline = Baseline(rules.warmup_steps, rules.baseline_steps)
        self.values = Window(rules.lag_window)
        self.watch = Watch(
            1.0, LEAVE, window=rules.lag_window, patience=rules.patience, leave_patience=rules.clear_patience
        )

    def update(self, step: int, value: float | None, *, judged: bool = True, excused: bool = False) -> None:
        """judged: False where nothing can be said of this step; the baseline takes its value all the same.
        excused: the value has a good reason, and counts as the usual one."""
        if value is None:
            return
        value = float(f"{value:.6g}")  # the state is written at every step: half of its digits say nothing
        self.values.add(value)
        ways = [] if not self.baseline.ready or not judged else self._ways(value)
        if ways:
            # Capped, or one wild value would fill the mean of its whole window.
            self.watch.update(step, 0.0 if excused else max(-CAP, min(CAP, max(ways))))
        # While the alarm stands, the level that it complains of must not become the usual one.
        self.baseline.add(value, may_renew=not self.watch.active)

    def _ways(self, value: float) -> list[float]:
        """How far the value is on the way from each usual level, 0, to the limit that is judged by there, 1:
        one scale for metrics that are bad above it and for those that are bad below. Empty where the rule
        says nothing."""
        return [
            0.0 if limit == usual else (value - usual) / (limit - usual) for usual, limit in self._levels()
        ]

    def _levels(self) -> list[tuple[float, float]]:
        """Usual level and limit: of now, and of the first usual level.

        A level that is held becomes the usual one, so a change that is slow enough would go on for ever
        without an alarm. So the first one is kept: the metric may not get CREEP times as far from it as its
        limit is, and where the level of now leaves the rule nothing to say, the first one's limit holds."""
        now = self.threshold(self.baseline)
        levels = [] if now is None else [(self.baseline.median, now)]
        first = self.baseline.before()
        limit = self.threshold(first) if first else None
        if first is None or limit is None:
            return levels
        usual = first.median
        if now is not None:
            creep = usual + CREEP * (limit - usual)
            # What cannot fall below 0 may not get CREEP times as far: the same ratio again stands for it.
            limit = max(creep, limit * limit / usual) if 0 < limit < usual else creep
        return [*levels, (usual, limit)]

    @property
    def far(self) -> bool:
        return (self.watch.mean or 0.0) > 0.75 * CAP

    def judged_by(self) -> tuple[float, float | None]:
        """The usual level and the limit that the last values are furthest on the way to."""
        value = self.values.mean
        levels = self._levels()
        if not levels or value is None:
            return self.baseline.median, None
        ways = self._ways(value)
        return levels[ways.index(max(ways))]

    def seen(self) -> str:
        usual, limit = self.judged_by()
        return self.words.format(
            value=self.values.mean,
            threshold=usual if limit is None else limit,
            usual=usual,
            window=self.values.size,
        )

    def doubt(self) -> str | None:
        """Why the metric's values could not be judged; None where they were."""
        needed = self.baseline.warmup + self.baseline.window.size
        if not self.baseline.ready:
            return f"{counted(self.baseline.seen, 'value')}, and its usual level takes {needed}"
        if not self._levels():
            return f"the rule says nothing where it is usually {self.baseline.median:.3g}"
        if not self.watch.window.full:
            after = len(self.baseline.recent.values)
            few = after < self.values.size
            return f"{after} values after its usual level, and {self.values.size} are needed" if few else None
        return None

    def state_dict(self) -> dict[str, Any]:
        return {
            "baseline": self.baseline.state_dict(),
            "values": self.values.values,
            "watch": self.watch.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.baseline.load_state_dict(state["baseline"])
        self.values.values = list(state["values"])
        self.watch.load_state_dict(state["watch"])


class FromBaseline(Rising):
    """A rule about metrics that leave their usual level: one Channel each, the first that does so raises the
    alarm."""

    def __init__(self, rules: MonitorRules):
        super().__init__(rules)
        self.channels = self.made_channels()

    @abstractmethod
    def made_channels(self) -> list[Channel]: ...

    def read(self, step: int, metrics: Metrics) -> None:
        for channel in self.channels:
            channel.update(step, number(metrics.get(channel.metric)))

    def waits_for(self, counts: Mapping[str, int]) -> str | None:
        doubts = [channel.doubt() for channel in self.channels if channel.baseline.seen]
        return doubts[0] if doubts and all(doubts) else None

    def active(self) -> Channel | None:
        return next((c for c in self.channels if c.watch.active), None)

    def stands(self) -> bool:
        return self.active() is not None

    def confidence(self) -> Confidence:
        found = self.active()
        return "high" if found and found.far else "medium"

    def describe(self, step: int) -> Alarm:
        found = self.active()
        assert found is not None  # `stands` was true
        _, limit = found.judged_by()
        return self.raised(step, found.metric, found.watch.since, found.seen(), found.values.mean, limit)

    def state(self) -> dict[str, Any]:
        return {"channels": [c.state_dict() for c in self.channels]}

    def load(self, state: Mapping[str, Any]) -> None:
        # A channel that an earlier version did not have stands at the end, and begins anew.
        for channel, kept in zip(self.channels, state["channels"], strict=False):
            channel.load_state_dict(kept)


class WhileRewardHolds(FromBaseline):
    """The same, of signs that say something new only where the reward does not fall anyway."""

    def __init__(self, rules: MonitorRules):
        super().__init__(rules)
        self.reward = RewardHolds(rules)

    def read(self, step: int, metrics: Metrics) -> None:
        holds = self.reward.update(metrics)
        for channel in self.channels:
            channel.update(step, number(metrics.get(channel.metric)), judged=holds)

    def state(self) -> dict[str, Any]:
        return {**super().state(), **self.reward.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self.reward.load_state_dict(state)


class RewardHolds:
    """Whether the mean reward is near its best so far: below it by at most what SHARE leaves of its size, and
    SLACK for the noise of low rewards. A run without rewards holds."""

    SHARE = 0.8
    SLACK = 0.05

    def __init__(self, rules: MonitorRules):
        self.window = Window(rules.reward_window)
        self.best: float | None = None

    def update(self, metrics: Metrics) -> bool:
        self.window.add(number(metrics.get("reward/mean")))
        # Of a full window alone: the mean of a few rewards is noise, and the best would keep it for ever.
        mean = self.window.full_mean
        if mean is None:
            return True
        self.best = mean if self.best is None else max(self.best, mean)
        return mean >= self.best - (1 - self.SHARE) * abs(self.best) - self.SLACK

    def state_dict(self) -> dict[str, Any]:
        return {"reward": self.window.values, "best_reward": self.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.window.values = list(state["reward"])
        self.best = state["best_reward"]


def too_few(name: str, count: int, needed: int) -> str | None:
    """Why so many values of a metric are not enough; None where they are."""
    return None if count >= needed else f"{counted(count, 'value')} of {name}, and {needed} are needed"


def above(change: float, rules: MonitorRules, ratio: float = 0.0) -> Callable[[Baseline], float]:
    """A threshold above the baseline: by `change`, by `baseline_mads` of its noise, and `ratio` times it,
    whichever is the highest."""
    return lambda b: max(b.median + change, b.median + rules.baseline_mads * b.sigma, ratio * b.median)


def below(change: float, rules: MonitorRules) -> Callable[[Baseline], float]:
    """A threshold below the baseline, by `change` or by `baseline_mads` of its noise, whichever is lower."""
    return lambda b: min(b.median - change, b.median - rules.baseline_mads * b.sigma)
