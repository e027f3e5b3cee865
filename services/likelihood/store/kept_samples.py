"""Which steps keep their sampled trajectories."""

from __future__ import annotations

from collections.abc import Iterable

MAX_ALARM_STEPS = 50
"""Steps of the oldest alarms that are kept beside the newest steps: an alarm's link must lead somewhere."""


def steps_to_drop(held: Iterable[int], newest: int, alarms: list[dict]) -> list[int]:
    """The steps of `held` whose trajectories go: all but the `newest` highest, the first, and those at which
    an alarm was raised."""
    steps = sorted(held)
    alarmed = sorted({int(alarm["step"]) for alarm in alarms})[:MAX_ALARM_STEPS]
    kept = {*steps[:1], *steps[len(steps) - newest :], *alarmed}
    return [] if len(steps) <= newest else [step for step in steps if step not in kept]
