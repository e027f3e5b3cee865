"""The parts of PLAN.md and PLAN_SECOND.md that come from the code; a test compares them."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.collapse.planned.arms import ARMS, BASE, FACTORIAL, FAMILIES, contrasts
from benchmarks.grids.leaves import leaves


def base_yaml() -> str:
    """Settings of every cell."""
    lines = []
    for key, value in BASE.items():
        lines.append(f"{key}:")
        lines += _yaml_lines(value, "  ")
    return "\n".join(lines)


def _yaml_lines(node: dict[str, Any], indent: str) -> list[str]:
    lines = []
    for key, value in node.items():
        if isinstance(value, dict):
            lines += [f"{indent}{key}:", *_yaml_lines(value, f"{indent}  ")]
        else:
            lines.append(f"{indent}{key}: {json.dumps(value) if isinstance(value, bool) else value}")
    return lines


def arms_table(family: int = 1) -> str:
    """The arms of a family, in their order."""
    lines = ["| # | arm | what it is | settings that differ from the base | minus |", "| --- " * 5 + "|"]
    for i, name in enumerate(FAMILIES[family], 1):
        arm = ARMS[name]
        keys = ", ".join(f"`{key}={_value(value)}`" for key, value in leaves_of(name)) or "none"
        if arm.follows:
            keys = f"`learner.match_kl`: the run folder of `{arm.follows}` with the same seed"
        part = " (factorial)" if name in FACTORIAL else ""
        lines.append(f"| {i} | `{name}` | {arm.says}{part} | {keys} | {arm.control or '-'} |")
    return "\n".join(lines)


def contrasts_line(family: int = 1) -> str:
    found = contrasts(family=family)
    pairs = ", ".join(f"`{arm}` - `{control}`" for arm, control in found)
    return f"{len(found)} contrasts: {pairs}."


def leaves_of(name: str) -> list[tuple[str, object]]:
    return list(leaves(ARMS[name].settings))


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
