"""Two results of one GPU benchmark side by side: what became slower or larger, and by how much."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

MORE_IS_BETTER = ("tokens_per_s", "steady_tokens_per_s", "speedup", "busy", "steady_busy")
LESS_IS_BETTER = (
    *("seconds", "seconds_per_step", "us_per_token", "engine_us_per_token", "peak_gib", "learner_peak_gib"),
    *("start_seconds", "command_seconds"),
    *("setup_seconds", "first_s", "ours", "bare", "goes_on_s", "joined_s", "mean"),
)
NAMES = ("what", "size", "zero", "workers", "how", "phase", "T", "syncs")
"""Fields that tell one entry of a list of results from another."""


class Change(NamedTuple):
    """One number in both results."""

    name: str
    before: float
    after: float
    loss: float
    """Share by which it became worse; negative where it became better."""


def numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """(path, number) of each measured quantity. Repeats of one thing count by their median."""
    if isinstance(value, dict):
        for key, inner in value.items():
            path = f"{name}/{key}" if name else str(key)
            if isinstance(inner, (dict, list)):
                yield from numbers(inner, path)
            elif key in MORE_IS_BETTER + LESS_IS_BETTER and isinstance(inner, (int, float)):
                yield path, float(inner)
    elif isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        rows: dict[str, list[dict[str, Any]]] = {}
        for row in value:
            about = " ".join(f"{k}={row[k]}" for k in NAMES if k in row)
            rows.setdefault(f"{name}[{about}]" if about else name, []).append(row)
        for path, alike in rows.items():
            merged = {
                key: statistics.median(row[key] for row in alike)
                for key in alike[0]
                if all(isinstance(row.get(key), (int, float)) for row in alike)
            }
            yield from numbers(merged, path)


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[Change]:
    """Of each number that both have, the worst first."""
    old = dict(numbers(before))
    found = []
    for name, value in numbers(after):
        if old.get(name, 0) <= 0 or value <= 0:
            continue
        more = name.rpartition("/")[2] in MORE_IS_BETTER
        loss = 1 - value / old[name] if more else value / old[name] - 1
        found.append(Change(name, old[name], value, loss))
    return sorted(found, key=lambda change: -change.loss)


def arguments(parser: Any) -> None:
    parser.add_argument("before", type=Path, help="a result's JSON file")
    parser.add_argument("after", type=Path, help="another of the same benchmark")
    parser.add_argument("--tolerance", type=float, default=0.1, help="share that is taken for noise")


def compare(args: Any) -> int:
    """Prints all changes, regressions marked. Returns 1 where there is one, 2 where nothing can be compared,
    otherwise 0."""
    before, after = (json.loads(f.read_text(encoding="utf-8")) for f in (args.before, args.after))
    found = changes(before, after)
    if not found:
        print("the two files have no measured number in common")
        return 2
    for key in ("devices", "versions", "cores"):
        if before.get(key) != after.get(key):
            print(f"not alike: {key} {before.get(key)} against {after.get(key)}")
    width = max(len(change.name) for change in found)
    for change in found:
        mark = "worse" if change.loss > args.tolerance else "better" if change.loss < -args.tolerance else ""
        values = f"{change.before:12.5g} {change.after:12.5g} {0.0 - change.loss:+8.1%}"
        print(f"{change.name:{width}} {values} {mark}")
    worse = sum(change.loss > args.tolerance for change in found)
    print(f"{worse} of {len(found)} numbers are worse by more than {args.tolerance:.0%}")
    return int(worse > 0)
