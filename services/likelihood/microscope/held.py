"""The gate of LLDS (arXiv 2512.04220) token by token, from log-probs before and after an update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class LldsGate:
    """`algorithm.llds.gate` and `min_drop`."""

    gate: Literal["action", "response", "token"]
    min_drop: float = 0.0
    """Drops of at most so many nats count as none."""

    def held(self, before: Sequence[np.ndarray], after: Sequence[np.ndarray]) -> list[list[int]]:
        """Indexes of the tokens of each action on which the gate is open, for one preserved trajectory.

        before, after: log-probs of each action's tokens, in nats. These are the tokens that LLDS would pull
        up next: its gradient is not 0 on them at the weights after the update.
        """
        drops = [
            np.asarray(b, np.float64) - np.asarray(a, np.float64) for b, a in zip(before, after, strict=True)
        ]
        drops = [np.where(np.abs(drop) <= self.min_drop, 0.0, drop) for drop in drops]
        whole = sum(float(drop.sum()) for drop in drops)
        units = {
            "action": [float(drop.sum()) > 0 for drop in drops],
            "response": [whole > 0] * len(drops),
            "token": [True] * len(drops),
        }
        opened = zip(drops, units[self.gate], strict=True)
        return [np.flatnonzero(drop > 0).tolist() if is_open else [] for drop, is_open in opened]
