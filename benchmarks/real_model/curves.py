"""The curves of docs/study.md of each run of a real model: reward and fixed probe by step, as SVG.

`python -m benchmarks.real_model.curves docs/images/real_model.svg` draws them from the committed metrics; a
test compares the file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.real_model.training import FALL, FIRST_LOTS, HALF_RATE, metrics, runs
from services.common.files import write_atomically

ARMS = {
    (0.0, 1e-5): ("GRPO, 1e-5", "#c0392b"),
    (0.2, 1e-5): ("LLDS-A 0.2, 1e-5", "#1f5fa8"),
    (0.0, 5e-6): ("GRPO, 5e-6", "#2e8b57"),
    (0.0, 3e-6): ("GRPO, 3e-6", "#d98c00"),
    (0.2, 3e-6): ("LLDS-A 0.2, 3e-6", "#7d3c98"),
    (0.0, 3e-5): ("GRPO, 3e-5", "#7f7f7f"),
}
"""By lambda and rate: name and colour."""
WIDTH = 420
HEIGHT = 230
LEFT = 50
TOP = 56
GAP = 70
"""Pixels of a panel, and of what is around it."""
STEPS = 55
Points = list[tuple[int, float]]


class Panel(NamedTuple):
    title: str
    low: float
    high: float
    marks: tuple[float, ...]
    """Values with a line and a number."""
    points: Callable[[list[dict[str, Any]]], Points]


def reward(rows: list[dict[str, Any]]) -> Points:
    """Mean of FALL steps, at the last of them."""
    rewards = [row["reward/mean"] for row in rows]
    return [(rows[i - 1]["step"], sum(rewards[i - FALL : i]) / FALL) for i in range(FALL, len(rows) + 1)]


def probe(rows: list[dict[str, Any]]) -> Points:
    """Cut at the panel's floor."""
    return [
        (row["step"], max(row["probe/fixed"], PANELS[1].low))
        for row in rows
        if row.get("probe/fixed") is not None
    ]


PANELS = (
    Panel(f"reward, mean of {FALL} steps", 0.0, 0.5, (0.0, 0.1, 0.2, 0.3, 0.4, 0.5), reward),
    Panel("fixed probe, nats per token", -2.0, 0.1, (-2.0, -1.5, -1.0, -0.5, 0.0), probe),
)


def drawing() -> str:
    """SVG: two panels by step, a line per run."""
    width = 2 * (LEFT + WIDTH) + GAP
    height = TOP + HEIGHT + 44
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="12" '
        f'viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for at, (label, colour) in enumerate(ARMS.values()):
        x = LEFT + 150 * at
        parts.append(f'<line x1="{x}" x2="{x + 20}" y1="16" y2="16" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{x + 26}" y="20">{label}</text>')
    for at, panel in enumerate(PANELS):
        parts += _panel(panel, LEFT + at * (WIDTH + LEFT + GAP))
    return "\n".join([*parts, "</svg>\n"])


def _panel(panel: Panel, left: int) -> Iterable[str]:
    def x(step: float) -> float:
        return left + WIDTH * step / STEPS

    def y(value: float) -> float:
        return TOP + HEIGHT * (panel.high - value) / (panel.high - panel.low)

    yield f'<text x="{left}" y="{TOP - 12}" font-weight="bold">{panel.title}</text>'
    for mark in panel.marks:
        line = f'x1="{left}" x2="{left + WIDTH}" y1="{y(mark):.1f}" y2="{y(mark):.1f}"'
        yield f'<line {line} stroke="#dddddd"/>'
        yield f'<text x="{left - 6}" y="{y(mark) + 4:.1f}" text-anchor="end">{mark:g}</text>'
    for step in range(0, STEPS + 1, 10):
        yield f'<text x="{x(step):.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{step}</text>'
    yield f'<text x="{left + WIDTH / 2:.1f}" y="{TOP + HEIGHT + 36}" text-anchor="middle">step</text>'
    for file in (FIRST_LOTS, HALF_RATE):
        for name, run in runs(file).items():
            label, colour = ARMS[run["llds.lambda"], run["lr"]]
            points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in panel.points(metrics(name)))
            yield (
                f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6">'
                f"<title>{label}, seed {run['seed']}</title></polyline>"
            )


if __name__ == "__main__":
    write_atomically(Path(sys.argv[1]), drawing())
