"""Values of recorded metrics that are no numbers: texts, lists, what is too large for one. Nothing is judged
by them, and a replay tells them: taken for a metric without a value, they would raise alarms."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from services.common.counting import counted

SHOWN = 60
"""Characters of a value that are shown."""


@dataclass
class NoNumbers:
    """Of one metric."""

    count: int
    line: int
    """Line, or row, of the first."""
    value: Any
    """The first."""

    def __str__(self) -> str:
        shown = json.dumps(self.value)
        shown = shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}..."
        return f"{counted(self.count, 'value')}, the first in line {self.line}: {shown}"


def number_or_text(written: str) -> float | str:
    """A number as it is written; the text itself where it is none, and where it is too large to be one."""
    try:
        value = float(written)
    except ValueError:
        return written
    return value if math.isfinite(value) or not any(map(str.isdigit, written)) else written


def no_numbers(rows: Iterable[tuple[int, Mapping[str, Any]]]) -> dict[str, NoNumbers]:
    """By name. rows: (line, metrics)."""
    found: dict[str, NoNumbers] = {}
    for line, row in rows:
        for name, value in row.items():
            if _judgeable(value):
                continue
            if name in found:
                found[name].count += 1
            else:
                found[name] = NoNumbers(1, line, value)
    return found


def judgeable(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics without those values."""
    return {name: value for name, value in metrics.items() if _judgeable(value)}


def _judgeable(value: Any) -> bool:
    """A null says that there was no value, and NaN that it was none: rules judge by both."""
    return value is None or isinstance(value, int | float)
