"""Metrics by data source: what was trained on, and the held-out scores; and the score by which checkpoints
are compared."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from trainer.config.held_out_scores import MACRO, source_in

MOST = 20
"""Sources that get metrics of their own; of a data file with more, the largest."""
_ODD = re.compile(r"[^\w.-]+", re.ASCII)


def label(source: str) -> str:
    """A source's name as a part of a metric's name."""
    return _ODD.sub("_", source)[:60] or "_"


def largest(sizes: Mapping[str, int]) -> list[str]:
    """The sources that get metrics of their own, the largest first. sizes: questions or rows by source."""
    return sorted(sizes, key=lambda name: (-sizes[name], name))[:MOST]


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
    out: dict[str, float] = {}
    for name in largest({name: len(found) for name, found in scores.items()}):
        out[f"data/{name}/prompts"] = float(len(groups[name]))
        out[f"data/{name}/em"] = sum(scores[name]) / len(scores[name])
    return out


def em_of(sources: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Exact match by source. sources: as `trainer.loop.rollouts.held_out.scores_of` gives them. Empty for
    one source alone."""
    if len(sources) < 2:
        return {}
    sizes = {name: scores["n"] for name, scores in sources.items()}
    return {label(name): sources[name]["em"] for name in largest(sizes)}


def held_out(em_by_source: Mapping[str, float], mode: str) -> dict[str, float]:
    """`eval/SOURCE/em_MODE` of an evaluation."""
    return {f"eval/{name}/em_{mode}": em for name, em in em_by_source.items()}


def score_metrics(score: Mapping[str, Any], mode: str) -> dict[str, float]:
    """The metrics of an evaluation. score: the overall scores, and `em_by_source`."""
    return {f"eval/em_{mode}": score["em"]} | held_out(score.get("em_by_source", {}), mode)


def compared(score: Mapping[str, Any], by: str) -> float | None:
    """The number of an evaluation by which checkpoints are compared (`trainer.best_by`). score: the overall
    scores, and `em_by_source`, empty where all questions are of one source. None where it is not known."""
    source = source_in(by)
    if by != MACRO and source is None:
        return score.get(by)
    by_source = score.get("em_by_source")  # earlier versions kept none
    if by_source is None:
        return None
    if not by_source:
        return score.get("em")
    if source is not None:
        return by_source.get(label(source))
    return math.fsum(by_source.values()) / len(by_source)
