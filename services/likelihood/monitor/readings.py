"""Which values of a metric can be one at all, and whether a metric still says something.

A share of 97, a negative norm or a probe that has stood still for hundreds of steps is no sign of anything:
neither good nor bad. Such values are passed over, and what they would have judged stays unknown.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from services.likelihood.monitor.watch import number

SHARE = (0.0, 1.0)
AMOUNT = (0.0, math.inf)
LOGP = (-100.0, 0.0)
POSSIBLE: dict[str, tuple[float, float]] = {
    "displacement/share_negative": SHARE,
    "rollout/valid": SHARE,
    "rollout/finished": SHARE,
    "rollout/truncated": SHARE,
    "rollout/at_turn_limit": SHARE,
    "groups/zero_variance": SHARE,
    "reward/right": SHARE,
    "reward/em": SHARE,
    "policy/clip_fraction": SHARE,
    "retrieval/empty": SHARE,
    "retrieval/repeated": SHARE,
    "retrieval/errors": SHARE,
    "retrieval/blank": SHARE,
    "text/repetition": SHARE,
    "text/non_words": SHARE,
    "eval/em_greedy": SHARE,
    "eval/em_sampled": SHARE,
    "rollout/searches": AMOUNT,
    "rollout/length": AMOUNT,
    "entropy": AMOUNT,
    "grad_norm": AMOUNT,
    "grad_norm/max": AMOUNT,
    "mismatch/abs_logp": AMOUNT,
    "leak/logp_entropy": AMOUNT,
    "llds/active_tokens": AMOUNT,
    "llds/lambda": AMOUNT,
    "logp/control": LOGP,
    "probe/control": LOGP,
    "probe/fixed": LOGP,
    "probe/lag": (-math.inf, 100.0),  # a fall that cannot be is a fall all the same
}
"""Least and largest value of a metric that is what its name says. Of those that are not here any value
is."""
NOISE = 0.5
FACTOR = 5.0
"""Estimates may lie a little outside: by NOISE below, and up to FACTOR times the largest value above."""


def impossible(name: str, value: Any) -> bool:
    """Whether a finite value lies so far outside of what the metric can be that it must have another unit, or
    be another metric."""
    found = number(value)
    if found is None or name not in POSSIBLE:
        return False
    low, high = POSSIBLE[name]
    return not low - NOISE <= found <= max(FACTOR * high, NOISE)


def possible_values(name: str, values: Iterable[float]) -> int:
    """How many of a metric's values are finite and not impossible."""
    return sum(math.isfinite(value) and not impossible(name, value) for value in values)


class Readings:
    """Passes over values that are impossible, and all other numbers of the metric until `patience` in a row
    are not: of shares in percent, those below 1 are possible."""

    def __init__(self, patience: int):
        self.patience = patience
        self.doubted: dict[str, int] = {}
        """Possible values still to come until the metric counts again."""

    def possible(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """The metrics that count."""
        kept = {}
        for name, value in metrics.items():
            if impossible(name, value):
                self.doubted[name] = self.patience
            elif name not in self.doubted or number(value) is None:  # no number has no unit
                kept[name] = value
            else:
                self.doubted[name] -= 1
                if not self.doubted[name]:
                    del self.doubted[name]
        return kept

    def state_dict(self) -> dict[str, int]:
        return dict(self.doubted)


class Freshness:
    """Whether a metric has been seen for long enough, has ever changed, and has said something lately.

    needed: values of a window. silence: steps without a further one after which nothing is known any more;
    where values come more seldom, GAPS of their distances. moving: a value that repeats the one before says
    nothing new (a counter that hangs repeats itself; a reward that has reached its best does so too).
    """

    GAPS = 3
    KEYS = ("count", "last", "gap", "value", "changed", "step")

    def __init__(self, needed: int, silence: int, *, moving: bool = False):
        self.needed = needed
        self.silence = silence
        self.moving = moving
        self.count = 0
        """Values since the start, or since the steps went back."""
        self.last: int | None = None
        """Step of the last value that said something."""
        self.gap = 0
        """Steps between the last two of them."""
        self.value: float | None = None
        self.changed = False
        """Two different values have been seen."""
        self.step = 0

    def update(self, step: int, value: float | None) -> None:
        self.step = step
        if value is None:
            return
        same = value == self.value
        self.changed = self.changed or (self.value is not None and not same)
        self.value = value
        self.count += 1
        if same and self.moving:
            return
        self.gap = 0 if self.last is None else step - self.last
        self.last = step

    def take_up(self, step: int, values: Sequence[float]) -> None:
        """From the window that a state of an earlier version holds."""
        self.count = len(values)
        self.changed = len(set(values)) > 1
        self.last = step if values else None

    def again(self) -> None:
        """The steps went back: what was seen must be seen anew."""
        self.count = 0
        self.last = None

    @property
    def fresh(self) -> bool:
        """It has said something lately."""
        return self.last is not None and self.step - self.last <= max(self.silence, self.GAPS * self.gap)

    @property
    def earned(self) -> bool:
        return self.count >= self.needed and self.changed and self.fresh

    def state_dict(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in self.KEYS}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for key in self.KEYS:
            setattr(self, key, state[key])
