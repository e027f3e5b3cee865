"""What the monitor makes of a run, against what was wrong with it. Pure: no files, no clock."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.barometer.collected import Result
from benchmarks.barometer.plan import KINDS
from services.likelihood.monitor.alarms import Alarm
from services.likelihood.monitor.phases import PhaseMonitor

WIDTH = 8
"""Steps in a mean reward."""
FELL_SHARE = 0.85
FELL_STEPS = 3


@dataclass(frozen=True)
class Judged:
    """One run."""

    result: Result
    alarms: list[Alarm]
    """All, in the order in which they were raised."""
    fell: int | None
    """First step at which the reward has fallen, after the fault where there is one."""

    @property
    def healthy_steps(self) -> int:
        """Steps before anything was wrong."""
        kind = KINDS[self.result.kind]
        if kind.kind == "healthy":
            return len(self.result.rows)
        return kind.begins - 1 if kind.kind == "injected" else 0

    def false_alarms(self) -> list[Alarm]:
        """Those raised in healthy steps."""
        return [alarm for alarm in self.alarms if alarm.step <= self.healthy_steps]

    @property
    def counted(self) -> bool:
        """Whether an alarm was due."""
        kind = KINDS[self.result.kind]
        return kind.kind == "injected" or (kind.kind == "driven" and self.fell is not None)

    def named(self) -> Alarm | None:
        """The first alarm of an expected rule, raised after the healthy steps."""
        expected = KINDS[self.result.kind].expected
        return next((a for a in self.alarms if a.rule in expected and a.step > self.healthy_steps), None)

    def any_alarm(self) -> Alarm | None:
        return next((a for a in self.alarms if a.step > self.healthy_steps), None)


def judge(result: Result) -> Judged:
    """The monitor with its defaults over a recorded run."""
    monitor = PhaseMonitor()
    alarms = [alarm for row in result.rows for alarm in monitor.update(row).alarms]
    kind = KINDS[result.kind]
    after = kind.begins if kind.kind == "injected" else 1
    return Judged(result, alarms, fell(result.rewards(), after))


def fell(rewards: Sequence[float | None], after: int = 1) -> int | None:
    """First of FELL_STEPS steps running (from 1) whose mean reward of WIDTH steps is under FELL_SHARE of the
    highest such mean before; only steps from `after` on count. Steps without a reward are passed over."""
    window: list[float] = []
    best = -math.inf
    low: list[int] = []
    for step, reward in enumerate(rewards, 1):
        if reward is None:
            continue
        window = [*window, reward][-WIDTH:]
        if len(window) < WIDTH:
            continue
        mean = statistics.fmean(window)
        best = max(best, mean)
        low = [*low, step] if mean < FELL_SHARE * best and step >= after else []
        if len(low) == FELL_STEPS:
            return low[0]
    return None


def wilson(hits: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927)."""
    if not n:
        return 0.0, 1.0
    share = hits / n
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, middle - half), min(1.0, middle + half)


def poisson(count: int) -> tuple[float, float]:
    """Exact 95 % interval of a Poisson mean (Garwood 1936), by bisection."""

    def at_most(mean: float, k: int) -> float:
        term = total = math.exp(-mean)
        for i in range(1, k + 1):
            term *= mean / i
            total += term
        return total

    def solved(k: int, level: float) -> float:
        low, high = 0.0, 10.0 + 4.0 * (k + 1)
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if at_most(middle, k) > level else (low, middle)
        return low

    return (solved(count - 1, 0.975) if count else 0.0), solved(count, 0.025)
