"""Names of phases and rules, and what an alarm is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Phase = Literal["healthy", "stagnation", "decay", "acceleration", "collapsed", "recovering"]
PHASES: tuple[Phase, ...] = ("healthy", "stagnation", "decay", "acceleration", "collapsed", "recovering")
TROUBLE = ("decay", "acceleration", "collapsed")
Rule = Literal["likelihood", "acceleration", "collapse", "leak", "nonfinite", "dead_batch", "no_reward"]


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
    phase: str
    seen: str
    """What was seen when it was raised, in a line, with numbers."""
    sure: Literal["low", "medium", "high"]
    """Grows while the alarm stands, when further signs agree."""
    advice: str
    """What to do."""
    value: float | None = None
    threshold: float | None = None
    cleared: int | None = None
    """Step at which it ended; None while it stands."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
