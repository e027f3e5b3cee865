"""Metrics that a run has, and that the monitor could not judge it by."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from services.likelihood.monitor.detectors.base import FromBaseline
from services.likelihood.monitor.phases import PhaseMonitor
from services.likelihood.monitor.readings import POSSIBLE, Freshness, impossible
from services.likelihood.monitor.watch import number

OF_SIGNS = {"probe/lag": "lag", "probe/fixed": "fixed", "displacement/share_negative": "share"}
ROUNDING = 1e-3
AT_TIMES = ("reward/missing",)
"""Recorded only in the steps that it is about."""


def doubts(
    metrics: Sequence[Mapping[str, Any]], monitor: PhaseMonitor, names: Sequence[str]
) -> dict[str, str]:
    """Why, by metric, for those that could not be judged, or not to the end. metrics: of each step; monitor:
    after all of them; names: metrics that the run has."""
    found = {}
    unjudged = _of_detectors(monitor)
    for name in names:
        why = (
            _of_values(name, metrics, monitor.rules.silence_steps)
            or _of_signs(name, monitor)
            or unjudged.get(name)
        )
        if why:
            found[name] = why
    return found


def _of_values(name: str, metrics: Sequence[Mapping[str, Any]], silence: int) -> str | None:
    seen = [(m["step"], m[name]) for m in metrics if number(m.get(name)) is not None]
    low, high = POSSIBLE.get(name, (-math.inf, math.inf))
    outside = sum(not low - ROUNDING <= value <= high + ROUNDING for _, value in seen)
    if 2 * outside > len(seen) or any(impossible(name, value) for _, value in seen):
        limits = f"between {low:g} and {high:g}" if math.isfinite(low) else f"at most {high:g}"
        limits = limits if math.isfinite(high) else f"at least {low:g}"
        return f"{outside} of {len(seen)} values are not {limits}: another unit?"
    fresh = Freshness(1, silence)
    for m in metrics:
        fresh.update(m["step"], number(m.get(name)))
    if not fresh.fresh and name not in AT_TIMES:
        return f"no value after step {fresh.last}"
    return None


def _of_signs(name: str, monitor: PhaseMonitor) -> str | None:
    """A probe that hangs."""
    sign = monitor.signs.seen.get(OF_SIGNS.get(name, ""))
    if sign is None or sign.count < sign.needed or sign.earned:
        return None
    return "the same value at every step" if not sign.changed else f"the same value since step {sign.last}"


def _of_detectors(monitor: PhaseMonitor) -> dict[str, str]:
    """By metric, where none of the rules that compare it with its usual level could do so."""
    said: dict[str, list[str | None]] = {}
    for detector in monitor.independent.values():
        for channel in detector.channels if isinstance(detector, FromBaseline) else ():
            said.setdefault(channel.metric, []).append(channel.doubt())
    return {name: why[0] for name, why in said.items() if why[0] and all(why)}
