"""Whether sampler and learner agree, of several looks at both."""

from __future__ import annotations

from typing import NamedTuple

SMALL, NOISE = 0.02, 1.5
"""They agree within so many nats in the mean, or so many times the learner's own distance to float32: of
random weights bfloat16 alone moves the log-probs by a tenth of a nat."""
DRIFT = 0.01
"""Nats by which a later look may be above the first, whatever the noise: each look has about the same."""


class Look(NamedTuple):
    """Means over tokens, in nats, after some syncs."""

    mean: float
    """Between sampler and learner."""
    own: float | None
    """Between the learner and itself in float32, of the same text; None where it was not measured."""

    @property
    def mark(self) -> float:
        """What the mean must stay below."""
        return max(SMALL, NOISE * (self.own or 0.0))


def drift_of(looks: list[Look]) -> float:
    """How far the farthest look is above the first."""
    return max(look.mean for look in looks) - looks[0].mean


def agree(looks: list[Look]) -> bool:
    """Whether each look is below its own mark, and none has drifted off."""
    return all(look.mean < look.mark for look in looks) and drift_of(looks) < DRIFT
