"""From a cell's series to the outcomes of PLAN.md. Pure: no files, no clock.

A run that ended early counts as dead from then on: later rewards and exact matches are 0. A value that is
missing for another reason makes the outcomes that need it None; nothing is filled in.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FIRST, END = 60, 150
"""Window of the primary outcome, in steps, both ends included."""
EVERY = 30
"""Steps between evaluations."""
QUESTIONS = 500
REWARD_WIDTH = 8
"""Steps in a mean reward, and steps running that it must stay low."""
PROBE_LAST = 10
"""Last values of the fixed probe that are averaged."""
COLUMNS = (
    "reward/mean",
    "grad_norm/max",
    "probe/fixed",
    "displacement/share_negative",
    "entropy",
    "rollout/searches",
    "rollout/length",
    "kl/old",
)
"""Metrics of a step that the outcomes, the check of the first batch, and readers of `matched_step` need."""
Row = Mapping[str, Any]
Scores = Mapping[int, float]
"""Exact match by step."""


@dataclass(frozen=True)
class Outcomes:
    """One cell. PLAN.md defines each."""

    em: float | None
    """Primary: mean held-out sampled EM of the evaluations at steps 60 to 150."""
    time_to_half: float
    """Steps until the reward stays under half of its best; END where it never does (`collapsed` is False)."""
    collapsed: bool
    em_greedy_end: float | None
    fall: float | None
    """Best sampled EM of all evaluations minus the last one."""
    grad_norm: float | None
    """log10 of the largest gradient norm before clipping, of steps with a finite one."""
    nonfinite_steps: int
    """Steps whose gradient norm was not finite."""
    probe_fall: float | None
    """Nats per token: the fixed probe's best value minus the mean of its last 10."""
    share_falling: float | None
    """Window mean of the share of preserved responses that the update made less likely."""
    entropy: float | None
    searches: float | None


PRIMARY = "em"
SECONDARY = (
    "time_to_half",
    "em_greedy_end",
    "fall",
    "grad_norm",
    "probe_fall",
    "share_falling",
    "entropy",
    "searches",
)


def planned(end: int = END) -> list[int]:
    """Steps of the evaluations: 0, every 30th, the last."""
    return sorted({*range(0, end, EVERY), end})


def outcomes(
    rows: Iterable[Row], sampled: Scores, greedy: Scores, *, died: bool = False, end: int = END
) -> Outcomes:
    """rows: a mapping per step, with `step` and COLUMNS. died: the run could not be brought to its end."""
    steps = {int(row["step"]): row for row in rows if 1 <= row["step"] <= end}
    last = max(steps, default=0)

    def score(scores: Scores, step: int) -> float | None:
        if died and step > last:
            return 0.0
        return scores.get(step)

    rewards = [_number(steps.get(step, {}).get("reward/mean")) or 0.0 for step in range(1, end + 1)]
    fell = first_half(rewards)
    norms = [_number(row.get("grad_norm/max")) for row in steps.values() if "grad_norm/max" in row]
    finite = [norm for norm in norms if norm is not None and norm > 0]
    probes = [p for step in sorted(steps) if (p := _number(steps[step].get("probe/fixed"))) is not None]
    all_sampled = [score(sampled, step) for step in planned(end)]
    window = [value for step, value in zip(planned(end), all_sampled, strict=True) if step >= FIRST]
    return Outcomes(
        em=_mean(window),
        time_to_half=float(end if fell is None else fell),
        collapsed=fell is not None,
        em_greedy_end=score(greedy, end),
        fall=None
        if _mean(all_sampled) is None
        else max(v for v in all_sampled if v is not None) - (all_sampled[-1] or 0.0),
        grad_norm=math.log10(max(finite)) if finite else None,
        nonfinite_steps=norms.count(None),
        probe_fall=max(probes) - statistics.fmean(probes[-PROBE_LAST:]) if probes else None,
        share_falling=_window(steps, "displacement/share_negative", end),
        entropy=_window(steps, "entropy", end),
        searches=_window(steps, "rollout/searches", end),
    )


def first_half(rewards: Sequence[float], width: int = REWARD_WIDTH) -> int | None:
    """First step (from 1) at which the mean of the last 8 rewards is under half of the highest such mean so
    far, and is so for 8 steps running. None: censored at the end."""
    best, low = 0.0, 0
    for step in range(width, len(rewards) + 1):
        mean = statistics.fmean(rewards[step - width : step])
        best = max(best, mean)
        low = low + 1 if mean < best / 2 else 0
        if low == width:
            return step - width + 1
    return None


def _window(steps: Mapping[int, Row], key: str, end: int) -> float | None:
    """Mean over steps 60 to the end; None where fewer than half of them have the metric."""
    values = [_number(steps.get(step, {}).get(key)) for step in range(FIRST, end + 1)]
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and 2 * len(known) >= len(values) else None


def _mean(values: Sequence[float | None]) -> float | None:
    """None where any is missing, and without any."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def _number(value: Any) -> float | None:
    """None for what is missing or not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
