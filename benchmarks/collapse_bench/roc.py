"""The barometer's ROC on CollapseBench: how often the monitor's rules name runs whose reward falls, how much
before, and how often they cry in runs with nothing wrong.

No threshold was chosen by these runs but `plunge_nats`, a rule that was added after they had been seen. The
curve scales the thresholds of `SCALED` by one factor, so that it has no parameter to fit; the other rules
stay as they are.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.barometer.judged import fell, poisson, wilson
from benchmarks.collapse_bench.causes import CAUSES
from benchmarks.collapse_bench.collected import Result
from services.likelihood.monitor.alarms import Rule
from services.likelihood.monitor.detectors.table import DETECTORS
from services.likelihood.monitor.phases import PhaseMonitor
from services.settings import MonitorRules

FACTORS = (0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0)
SCALED = (
    "lag_nats", "plunge_nats", "lag_clear_nats", "acceleration_nats", "fixed_drop_nats", "flat_nats",
    "share_negative", "leak_nats", "entropy_rise_alarm_nats", "share_rise", "mismatch_nats",
    "control_drop_nats", "gap_drop",
)  # fmt: skip
"""Thresholds that a factor scales; shares stay below .95."""
SAME_EVERYWHERE: tuple[Rule, ...] = (
    "collapse", "nonfinite", "dead_batch", "no_reward", "gradient", "entropy_low", "degenerate_groups",
    "length", "silent_llds",
)  # fmt: skip
"""Rules without a threshold of SCALED: a run that one of them names is named at every factor."""
SOUND = ("none", "exact")
"""Causes under which nothing is wrong."""
FAMILIES = {"likelihood": ("likelihood", "acceleration"), "any rule": tuple(DETECTORS)}
Z = 1.959964


@dataclass(frozen=True)
class Run:
    """One cell. alarms: by factor, (rule, step) in the order in which they were raised, from the first step
    at which something is wrong on; `early` are those before it."""

    result: Result
    begins: int
    fell: int | None
    alarms: dict[float, list[tuple[str, int]]]
    early: list[tuple[str, int]] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        """Nothing is wrong with it, and its reward did not fall."""
        return self.result.key[0] in SOUND and self.fell is None

    def first(self, rules: Iterable[str], factor: float = 1.0) -> int | None:
        """Step of the first alarm of these rules."""
        return next((step for rule, step in self.alarms[factor] if rule in rules), None)

    def score(self, rules: Iterable[str]) -> float:
        """The largest factor at which one of the rules still gives an alarm; 0 without any."""
        return max((f for f in FACTORS if self.first(rules, f) is not None), default=0.0)


def scaled(factor: float) -> MonitorRules:
    """The defaults, with the thresholds of SCALED times a factor."""
    plain = MonitorRules()
    changed = {}
    for name in SCALED:
        value = getattr(plain, name) * factor
        share = name in ("share_negative", "share_rise")
        changed[name] = min(value, 0.95) if share else value
    return MonitorRules(**changed)


def judged(results: Sequence[Result], factors: Sequence[float] = FACTORS) -> list[Run]:
    """Every cell under every factor."""
    rules = {factor: scaled(factor) for factor in factors}
    found = []
    for result in results:
        begins = CAUSES[result.key[0]].begins
        at = fell([row.get("reward/mean") for row in result.rows], begins)
        all_of = {factor: _alarms(result, rules[factor]) for factor in factors}
        late = {factor: [a for a in alarms if a[1] >= begins] for factor, alarms in all_of.items()}
        found.append(Run(result, begins, at, late, [a for a in all_of[1.0] if a[1] < begins]))
    return found


def _alarms(result: Result, rules: MonitorRules) -> list[tuple[str, int]]:
    monitor = PhaseMonitor(rules)
    return [(a.rule, a.step) for row in result.rows for a in monitor.update(row).alarms]


@dataclass(frozen=True)
class Area:
    """Area under a ROC curve, ties counted half, with a 95 % score interval (`area`)."""

    area: float
    low: float
    high: float

    def __str__(self) -> str:
        return "-" if math.isnan(self.area) else f"{self.area:.2f} ({self.low:.2f} to {self.high:.2f})"


def area(positive: Sequence[float], negative: Sequence[float]) -> Area:
    """P(a score of `positive` is higher than one of `negative`), ties half.

    The interval holds the areas from which the seen one is at most `Z` of their own standard errors away, by
    the variance of Hanley and McNeil (1982) with the mean of both group sizes in its terms (Newcombe 2006,
    method 5). As Wilson's of a share, it has a width at areas of 0 and 1 too, where the standard error of
    the seen area, and any bootstrap of it, is 0.
    """
    n, m = len(positive), len(negative)
    if not n or not m:
        return Area(math.nan, math.nan, math.nan)
    a = sum((p > q) + 0.5 * (p == q) for p in positive for q in negative) / (n * m)
    return Area(a, _lowest(a, n, m), 1 - _lowest(1 - a, n, m))


def _lowest(a: float, n: int, m: int) -> float:
    """The lower end of the interval of an area, by bisection. The upper one mirrors it."""
    low, high = 0.0, a
    for _ in range(60):
        middle = (low + high) / 2
        spread = 1 + ((n + m) / 2 - 1) * ((1 - middle) / (2 - middle) + middle / (1 + middle))
        variance = middle * (1 - middle) * spread / (n * m)
        too_far = a - middle > Z * math.sqrt(variance)
        low, high = (middle, high) if too_far else (low, middle)
    return low


def curve(runs: Sequence[Run], rules: Sequence[str]) -> list[tuple[float, float]]:
    """(share of sound runs with an alarm, share of fallen runs with one), by falling strictness, from (0, 0)
    to (1, 1)."""
    fallen = [run.score(rules) for run in runs if run.fell is not None]
    sound = [run.score(rules) for run in runs if run.sound]
    points = [(0.0, 0.0)]
    for factor in sorted(FACTORS, reverse=True):
        if fallen and sound:
            points.append(
                (sum(s >= factor for s in sound) / len(sound), sum(s >= factor for s in fallen) / len(fallen))
            )
    return [*points, (1.0, 1.0)]


def section(runs: Sequence[Run]) -> str:
    """The page's part: what was counted, a table by rule, the areas."""
    fallen = [run for run in runs if run.fell is not None]
    sound = [run for run in runs if run.sound]
    steps = sum(len(run.result.rows) for run in sound)
    steps += sum(run.begins - 1 for run in runs if not run.sound)
    wrong = [a for run in sound for a in run.alarms[1.0]] + [a for run in runs for a in run.early]
    low, high = poisson(len(wrong))
    per = 1000 / steps if steps else math.nan
    rate = f"{per * len(wrong):.1f} ({per * low:.1f} to {per * high:.1f})" if steps else "-"
    by_rule = ", ".join(f"`{rule}` {n}" for rule, n in Counter(rule for rule, _ in wrong).most_common())
    areas = ", ".join(
        f"{name} {area([r.score(rules) for r in fallen], [r.score(rules) for r in sound])}"
        for name, rules in FAMILIES.items()
    )
    return "\n\n".join(
        [
            f"*Fallen*: the reward fell from the cause on ({len(fallen)} runs). *Sound*: nothing was "
            f"wrong, and it did not fall ({len(sound)} runs). False alarms: {len(wrong)} in {steps:,} steps "
            f"of sound runs and before an injected fault, {rate} per 1,000{f': {by_rule}' if wrong else ''}. "
            "Rules that compare with a usual level learn it from the values 11 to 30, in which an injected "
            "fault begins: what they miss here they may see where a run was sound for 30 steps.",
            rules_table(fallen, sound),
            "![ROC of the monitor on these runs](images/collapse_bench_roc.svg)",
            "Area under the curve (95 %, the score interval of Newcombe 2006, method 5, which has a width at "
            "0 and 1 too; runs of one seed are taken for independent, which they are not quite): "
            f"{areas}. The curve is not of the plan. `plunge_nats` was added after these runs had been seen: "
            "it brought 23 alarms forward by a step and one by five, and raised no other.",
            f"Along the curve one factor, from {FACTORS[0]:g} to {FACTORS[-1]:g}, scales "
            f"{_names(SCALED)}; shares stay below .95. All other thresholds stay. {_names(SAME_EVERYWHERE)} "
            "have none of those scaled, so a run that one of them names is named all along the curve of any "
            "rule.",
        ]
    )


def rules_table(fallen: Sequence[Run], sound: Sequence[Run]) -> str:
    """A row for each family and each rule that was raised: recall with its interval, recall before the fall,
    median lead, false alarms."""
    lines = [
        "| rule | fallen runs with an alarm (95 %) | before the reward fell | median lead (range) | sound "
        "runs with an alarm (95 %) |",
        "| --- " * 5 + "|",
    ]
    raised = {rule for run in (*fallen, *sound) for rule, _ in run.alarms[1.0]}
    rows = {f"**{name}**": rules for name, rules in FAMILIES.items()}
    rows |= {f"`{rule}`": (rule,) for rule in DETECTORS if rule in raised}
    for name, rules in rows.items():
        hits = [(run, at) for run in fallen if (at := run.first(rules)) is not None]
        leads = [run.fell - at for run, at in hits if run.fell is not None]
        spread = f"{statistics.median(leads):g} ({min(leads)} to {max(leads)})" if leads else "-"
        false = sum(run.first(rules) is not None for run in sound)
        early = sum(lead > 0 for lead in leads)
        cells = (name, _share(len(hits), len(fallen)), str(early), spread, _share(false, len(sound)))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _share(hits: int, n: int) -> str:
    low, high = wilson(hits, n)
    return f"{hits} of {n} ({low:.2f} to {high:.2f})" if n else "0 of 0"


def drawing(runs: Sequence[Run]) -> str:
    """The curves as SVG; a ring marks the defaults."""
    size, left, top = 300, 52, 14

    def at(point: tuple[float, float]) -> str:
        return f"{left + size * point[0]:.1f},{top + size * (1 - point[1]):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="12" '
        f'viewBox="0 0 {left + size + 150} {top + size + 44}">',
        f'<rect x="{left}" y="{top}" width="{size}" height="{size}" fill="#ffffff" stroke="#8a93a3"/>',
        f'<polyline points="{at((0, 0))} {at((1, 1))}" fill="none" stroke="#c4cad4" stroke-dasharray="4 4"/>',
    ]
    for number, (name, rules) in enumerate(FAMILIES.items()):
        colour = ("#2a5db0", "#d1832a")[number]
        points = curve(runs, rules)
        path = " ".join(at(point) for point in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        x, y = at(
            points[1 + sorted(FACTORS, reverse=True).index(1.0)] if len(points) > 2 else points[0]
        ).split(",")
        parts.append(f'<circle cx="{x}" cy="{y}" r="5" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(
            f'<text x="{left + size + 10}" y="{top + 20 + 20 * number}" fill="{colour}">{name}</text>'
        )
    for tick in (0, 0.5, 1):
        x, y = at((tick, tick)).split(",")
        parts.append(
            f'<text x="{x}" y="{top + size + 16}" fill="#5b6473" text-anchor="middle">{tick:g}</text>'
        )
        parts.append(
            f'<text x="{left - 6}" y="{float(y) + 4}" fill="#5b6473" text-anchor="end">{tick:g}</text>'
        )
    middle = left + size / 2
    parts += [
        f'<text x="{middle}" y="{top + size + 36}" fill="#5b6473" text-anchor="middle">sound runs with an '
        "alarm</text>",
        f'<text transform="translate(14 {top + size / 2}) rotate(-90)" fill="#5b6473" text-anchor="middle">'
        "fallen runs with an alarm</text>",
        "</svg>\n",
    ]
    return "\n".join(parts)
