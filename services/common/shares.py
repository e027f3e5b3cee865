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


def paired_interval(
    right_in_both: int, turned_wrong: int, turned_right: int, wrong_in_both: int
) -> tuple[float, float]:
    """The interval of the change of a share, where it is known of each question what its two answers were
    (Newcombe 1998, paired data, method 10, with his correction of phi)."""
    n = right_in_both + turned_wrong + turned_right + wrong_in_both
    first, last = (right_in_both + turned_wrong) / n, (right_in_both + turned_right) / n
    low_first, high_first = wilson(first, n)
    low_last, high_last = wilson(last, n)
    agree, differ = right_in_both * wrong_in_both, turned_wrong * turned_right
    right = (right_in_both + turned_wrong, right_in_both + turned_right)
    sides = (*right, *(n - one for one in right))
    apart = max(agree - differ - n / 2, 0.0) if agree > differ else float(agree - differ)
    phi = apart / math.sqrt(math.prod(sides)) if all(sides) else 0.0

    def reach(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a * a - 2 * phi * a * b + b * b))

    change = last - first
    low = change - reach(last - low_last, high_first - first)
    return low, change + reach(high_last - last, first - low_first)


def is_clear(interval: tuple[float, float]) -> bool:
    """Whether a change lies outside of the noise: its interval leaves 0 out."""
    return interval[0] > 0 or interval[1] < 0
