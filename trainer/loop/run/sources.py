"""Metrics by data source: what was trained on, and the held-out scores."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

MOST = 20
"""Sources that get metrics of their own; of a data file with more, the largest."""
_ODD = re.compile(r"[^\w.-]+", re.ASCII)


def label(source: str) -> str:
    """A source's name as a part of a metric's name."""
    return _ODD.sub("_", source)[:60] or "_"


def training(rows: Iterable[tuple[str, str, float]]) -> dict[str, float]:
    """`data/SOURCE/prompts` (groups) and `data/SOURCE/em` (mean exact match) of a batch. rows: source, group
    and exact match of each trajectory. Empty where all are of one source, since the batch's own metrics say
    the same."""
    groups: dict[str, set[str]] = defaultdict(set)
    scores: dict[str, list[float]] = defaultdict(list)
    for source, group, em in rows:
        groups[label(source)].add(group)
        scores[label(source)].append(em)
    if len(scores) < 2:
        return {}
    largest = sorted(scores, key=lambda name: (-len(scores[name]), name))[:MOST]
    out: dict[str, float] = {}
    for name in largest:
        out[f"data/{name}/prompts"] = float(len(groups[name]))
        out[f"data/{name}/em"] = sum(scores[name]) / len(scores[name])
    return out


def em_of(sources: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Exact match by source. sources: as `trainer.loop.rollouts.held_out.scores_of` gives them. Empty for
    one source alone."""
    largest = sorted(sources, key=lambda name: (-sources[name]["n"], name))[:MOST]
    return {label(name): sources[name]["em"] for name in largest} if len(sources) > 1 else {}


def held_out(em_by_source: Mapping[str, float], mode: str) -> dict[str, float]:
    """`eval/SOURCE/em_MODE` of an evaluation."""
    return {f"eval/{name}/em_{mode}": em for name, em in em_by_source.items()}
