"""How far a share of right answers, and the change between two of them, can be trusted.

static/overview/page_held_out.js has the same for the live page; a test compares them.
"""

from __future__ import annotations

import math

Z = 1.959964
"""Of a 95 % interval."""


def wilson(share: float, n: int) -> tuple[float, float]:
    """Wilson's interval of a share of `n` (at least 1) answers: it is right for few answers, and at 0 and 1
    too."""
    middle = share + Z * Z / (2 * n)
    half = Z * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n))
    whole = 1 + Z * Z / n
    return max(0.0, (middle - half) / whole), min(1.0, (middle + half) / whole)


def change_interval(first: float, last: float, n: int) -> tuple[float, float]:
    """The interval of `last - first`, two shares of the same `n` questions (Newcombe 1998, method 10).

    It takes the two as independent. Answers to the same questions agree more than that, so it is rather too
    wide than too narrow."""
    low_first, high_first = wilson(first, n)
    low_last, high_last = wilson(last, n)
    change = last - first
    low = change - math.hypot(last - low_last, high_first - first)
    return low, change + math.hypot(high_last - last, first - low_first)


def is_clear(interval: tuple[float, float]) -> bool:
    """Whether a change lies outside of the noise: its interval leaves 0 out."""
    return interval[0] > 0 or interval[1] < 0
