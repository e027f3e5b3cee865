"""The figure of `unspiral displacement`: what one update does to answers to fixed prompts, as SVG.

A file has `step`, `samples`, `summary` and `groups`: [{"question", "responses": [{"right", "displacement",
...}]}]; a displacement is null where the group taught nothing. `summary` has `similarity`, of the hidden
states of right and wrong answers (trainer/loop/update/similarity.py), since that is measured.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from services.common.counting import counted
from services.common.users_files import reading

FOLDER = "displacement"
"""Of a run's folder."""
WIDTH, HEIGHT = 960, 230
LEFT, RIGHT, TOP, BOTTOM = 64, 8, 26, 24
COLOURS = {True: "#1f9d6b", False: "#d1434f"}
BAR = 20
NUMBERS = 330
"""Width of the words to the right of a bar of 1."""
KINDS = {"right_wrong": "right with wrong", "right_right": "two right", "wrong_wrong": "two wrong"}
"""Kinds of pairs, and their names."""
Points = list[tuple[int, float, bool]]
"""Place of the group, displacement in nats per token, whether the answer is right."""


def measured(run_dir: Path) -> list[dict[str, Any]]:
    """What was measured of a run's checkpoints, by step. Raises UserError for a file of another form."""
    found = []
    for file in sorted((run_dir / FOLDER).glob("*.json")):
        with reading(file, "a file that unspiral displacement wrote"):
            kept = json.loads(file.read_text(encoding="utf-8"))
            points(kept["groups"])
            alike = kept.get("summary", {}).get("similarity")
            said_of_similarity(alike)
            found.append({"step": int(kept["step"]), "groups": kept["groups"], "similarity": alike})
    return sorted(found, key=lambda one: one["step"])


def points(groups: Sequence[Mapping[str, Any]]) -> Points:
    """The answers of groups that made a step; groups in the order of their right answers' mean, those without
    one last."""

    def key(group: Mapping[str, Any]) -> float:
        right = [r["displacement"] for r in group["responses"] if r["right"]]
        return statistics.fmean(right) if right else math.inf

    moved = [g for g in groups if all(r["displacement"] is not None for r in g["responses"])]
    return [
        (place, float(r["displacement"]), bool(r["right"]))
        for place, group in enumerate(sorted(moved, key=key))
        for r in group["responses"]
    ]


def drawing(run: str, measured_of_run: Sequence[Mapping[str, Any]]) -> str:
    """One SVG per checkpoint, one under another, and under each that of the hidden states where they were
    compared."""
    return "\n".join(_panel(run, one) + _similarity(one.get("similarity")) for one in measured_of_run)


def _panel(run: str, one: Mapping[str, Any]) -> str:
    found = points(one["groups"])
    title = f"{run}, step {one['step']}: {_said(found)}"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="12" fill="currentColor"><title>{escape(title)}</title>'
        f'<text x="{LEFT}" y="15">{escape(title)}</text>'
    )
    if not found:
        return f"{head}</svg>"
    low = min(0.0, *(value for _, value, _ in found))
    high = max(0.0, *(value for _, value, _ in found))
    span = (high - low) or 1.0
    groups = found[-1][0] + 1

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / span

    parts = [head]
    for value in dict.fromkeys((low, 0.0, high)):
        style = 'stroke="currentColor"' if value == 0 else 'stroke="currentColor" stroke-opacity=".2"'
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" {style}/>'
        )
        parts.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:+.3f}</text>')
    for place, value, right in found:
        x = LEFT + (WIDTH - LEFT - RIGHT) * (place + (0.35 if right else 0.65)) / groups
        parts.append(_mark(x, y(value), right))
    parts.append(
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">{groups} prompts, by the mean of '
        "their right answers; dot: right, cross: wrong; nats per token</text></svg>"
    )
    return "\n".join(parts)


def said_of_similarity(alike: Mapping[str, Any] | None) -> str:
    """In words; empty where no pair of a right and a wrong answer could be compared."""
    if not alike or alike["right_wrong"]["cosine"] is None:
        return ""
    parts = [
        f"{name} {one['cosine']:.3f} ({one['compared']} of {counted(one['pairs'], 'pair')})"
        for kind, name in KINDS.items()
        if (one := alike[kind])["cosine"] is not None
    ]
    mixed = alike["right_wrong"]
    return (
        f"hidden states over the {alike['window']} action tokens after the first that differs, mean cosine: "
        f"{', '.join(parts)}; a right and a wrong answer share {mixed['shared_tokens']:.1f} action tokens "
        "before that"
    )


def _similarity(alike: Mapping[str, Any] | None) -> str:
    """A bar per kind of pair, to the left of 0 where its cosine lies below."""
    if not alike or not said_of_similarity(alike):
        return ""
    shown = [(name, alike[kind]) for kind, name in KINDS.items() if alike[kind]["cosine"] is not None]
    zero = WIDTH / 2 if any(one["cosine"] < 0 for _, one in shown) else LEFT + 126
    unit = WIDTH - RIGHT - NUMBERS - zero
    height = BAR * (len(shown) + 2)
    parts = [
        f'\n<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12" fill="currentColor">'
        f"<title>{escape(said_of_similarity(alike))}</title>"
        f'<text x="{LEFT}" y="15">cosine of hidden states over the {alike["window"]} action tokens after the '
        f"first that differs ({counted(alike['groups'], 'prompt')} with right and wrong answers)</text>"
    ]
    for place, (name, one) in enumerate(shown, 1):
        y = BAR * place
        end = zero + unit * one["cosine"]
        parts.append(
            f'<text x="{LEFT}" y="{y + 14}">{name}</text>'
            f'<rect x="{min(zero, end):.1f}" y="{y + 4}" width="{abs(end - zero):.1f}" height="{BAR - 8}" '
            'fill-opacity=".45"/>'
            f'<text x="{max(zero, end) + 6:.1f}" y="{y + 14}">{one["cosine"]:.3f}, {one["compared"]} of '
            f"{counted(one['pairs'], 'pair')}, {one['shared_tokens']:.1f} action tokens shared</text>"
        )
    return "".join([*parts, "</svg>"])


def _mark(x: float, y: float, right: bool) -> str:
    if right:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{COLOURS[True]}" fill-opacity=".8"/>'
    arms = f"M{x - 3:.1f} {y - 3:.1f}l6 6m0 -6l-6 6"
    return f'<path d="{arms}" stroke="{COLOURS[False]}" stroke-width="1.5" fill="none"/>'


def _said(found: Points) -> str:
    words = []
    for name, right in (("right", True), ("wrong", False)):
        values = [value for _, value, good in found if good == right]
        if values:
            fell = sum(value < 0 for value in values)
            words.append(
                f"{fell} of {len(values)} {name} answers lost likelihood, median "
                f"{statistics.median(values):+.4f}"
            )
    return "; ".join(words) or "no group taught anything"
