"""Names of phases and rules, and what an alarm is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

Phase = Literal["healthy", "stagnation", "decay", "acceleration", "collapsed", "recovering", "unknown"]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""A store keeps a phase as its place in this tuple, so a new one goes to the end."""
TROUBLE = ("decay", "acceleration", "collapsed")
Rule = Literal[
    "likelihood",
    "acceleration",
    "collapse",
    "leak",
    "nonfinite",
    "dead_batch",
    "no_reward",
    "gradient",
    "entropy_low",
    "entropy_high",
    "interaction",
    "validity",
    "mismatch",
    "degenerate_groups",
    "truncation",
    "length",
    "retrieval",
    "garbage",
    "control_tokens",
    "reward_gap",
    "silent_llds",
]
Confidence = Literal["low", "medium", "high"]
CONFIDENCES: tuple[Confidence, ...] = get_args(Confidence)


@dataclass
class Alarm:
    """Something that a person should look at."""

    rule: Rule
    """One alarm of a rule stands at a time."""
    metric: str
    """The metric that raised it."""
    step: int
    """Step at which it was raised."""
    since: int
    """First step at which the sign was seen."""
    phase: Phase
    seen: str
    """What was seen when it was raised, in one line with numbers."""
    confidence: Confidence
    """Grows while the alarm stands, when further signs agree."""
    advice: str
    """What to do."""
    value: float | None = None
    threshold: float | None = None
    cleared: int | None = None
    """Step at which it ended; None while it stands."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, recorded: Mapping[str, Any]) -> Alarm:
        """The alarm that `as_dict` of this or an earlier version has written."""
        return cls(**renamed(recorded))


def renamed(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded alarm by the keys of today. Earlier versions wrote `sure` for `confidence`."""
    return {"confidence" if key == "sure" else key: value for key, value in recorded.items()}


WORST_PHASES: tuple[Phase, ...] = (
    "collapsed", "acceleration", "decay", "stagnation", "recovering", "healthy", "unknown"
)  # fmt: skip
WORST_CONFIDENCE: tuple[Confidence, ...] = ("high", "medium", "low")


def worst(alarms: Sequence[Alarm]) -> Alarm | None:
    """The alarm to look at first, in the order of the page: by phase, then confidence, then the newest. None
    without any."""

    def rank(alarm: Alarm) -> tuple[int, int, int]:
        return WORST_PHASES.index(alarm.phase), WORST_CONFIDENCE.index(alarm.confidence), -alarm.step

    return min(alarms, key=rank, default=None)
