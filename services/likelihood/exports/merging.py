"""Rows of metrics by step: parts of a step are one, a resumed run takes the place of what it does again, and
two runs in one file are refused."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.common.errors import UserError
from services.likelihood.monitor.watch import number
from services.likelihood.records import MAX_STEP

ALWAYS_NEW = re.compile(r"time|^_|epoch|attempt|policy_version|seconds|runtime", re.IGNORECASE)
"""Names whose values differ from row to row of one step."""
LEAST_RETURNS = 3
"""A run may be resumed so often before the file can be of two runs."""

Row = tuple[int, dict[str, Any]]


def by_step(path: Path, rows: Sequence[Row], *, ours: bool) -> dict[int, dict[str, Any]]:
    """Metrics of each step, in order of steps. rows: (line, metrics with `step`). ours: a row is a whole
    step, and a later one of the same step takes its place; otherwise it may be a part of one. Raises
    UserError."""
    for line, row in rows:
        step = row.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= MAX_STEP:
            raise UserError(
                f"{path}, line {line}: expected an object with a whole number `step` from 0 to {MAX_STEP}"
            )
    if not ours:
        rows = joined(without_gaps(rows))
    refuse_two_runs(path, rows)
    found: dict[int, dict[str, Any]] = {}
    before = -1
    for _, row in rows:
        step = row["step"]
        kept = found.get(step, {})
        again = differing(kept, row)
        if again and step < before:  # a resumed run: what the earlier attempt did after this step is void
            found = {at: metrics for at, metrics in found.items() if at <= step}
        part = {name: v for name, v in row.items() if v is not None or name not in kept}
        found[step] = row if ours else kept | part
        before = step
    return {step: found[step] for step in sorted(found)}


def joined(rows: Sequence[Row]) -> list[Row]:
    """Rows of which those of one step that follow each other are one, as long as no value changes: event
    files hold a row per value. A resumed run is then told by whole steps, whichever metric comes first in
    them."""
    whole: list[Row] = []
    for line, row in rows:
        _, before = whole[-1] if whole else (0, {})
        if row["step"] != before.get("step") or differing(before, row):
            whole.append((line, dict(row)))
        else:
            before |= {name: v for name, v in row.items() if v is not None or name not in before}
    return whole


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """A metric that both have, with different values; None without any."""
    for name in (name for name in one if name in other):
        first, second = number(one[name]), number(other[name])
        if first is not None and second is not None and first != second and not ALWAYS_NEW.search(name):
            return name
    return None


def refuse_two_runs(path: Path, rows: Sequence[Row]) -> None:
    """A resumed run goes back once for all the steps that it does again. Where the file goes back for most of
    the steps that stand twice, two runs take turns in it."""
    found: dict[int, dict[str, Any]] = {}
    before = -1
    twice = returns = 0
    named = None
    for _, row in rows:
        step = row["step"]
        kept = found.get(step, {})
        name = differing(kept, row)
        if name is not None:
            twice += 1
            returns += step <= before
            named = named or (step, name)
        found[step] = kept | row
        before = step
    if named and returns >= max(LEAST_RETURNS, len(found) / 10) and returns > twice / 4:
        step, name = named
        raise UserError(
            f"{path}: {twice} rows repeat a step with other values ({name} at step {step}): two runs in one "
            "file, or several rows per step; give one run, and one row per step"
        )


def without_gaps(rows: Sequence[Row]) -> list[Row]:
    """Rows without the nulls of a metric that is null in most rows, as long as they are no longer than those
    between two values: tables hold a null, or a NaN, where a metric was not logged. One that ends in more of
    them keeps those."""
    last: dict[str, int] = {}
    gaps: dict[str, int] = {}
    empty: Counter[str] = Counter()
    for at, (_, row) in enumerate(rows):
        for name, value in row.items():
            if _absent(value):
                empty[name] += 1
            else:
                gaps[name] = max(gaps.get(name, 0), at - last.get(name, at))
                last[name] = at
    until = {name: last[name] + gaps[name] for name in empty if name in last}
    sparse = {name for name in until if 2 * empty[name] > len(rows)}
    return [
        (line, {n: v for n, v in row.items() if not (n in sparse and _absent(v) and at < until[n])})
        for at, (line, row) in enumerate(rows)
    ]


def _absent(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))
