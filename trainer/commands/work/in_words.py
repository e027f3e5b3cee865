"""Results of commands in words, for a terminal. Programs get the same as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.common.counting import counted

_MODES = {"": "greedily", "_sampled": "sampled"}


def run_in_words(summary: Mapping[str, Any]) -> str:
    """The summary of a run: steps, time, phase, and the held-out scores that it has."""
    minutes, seconds = divmod(round(summary.get("seconds") or 0), 60)
    lines = [
        f"{counted(summary.get('steps', 0), 'step')} in {minutes}:{seconds:02}, "
        f"phase {summary.get('phase', 'unknown')}"
    ]
    for suffix, how in _MODES.items():
        before = summary.get(f"em_before{suffix}")
        after = summary.get(f"em_after{suffix}")
        if before is not None and after is not None:
            lines.append(f"exact match on held-out questions, {how}: {before:.3f} before, {after:.3f} after")
    return "\n".join(lines)


def scores_in_words(scores: Mapping[str, Any]) -> str:
    """The scores of an evaluation, a line per data source."""
    rows = {**scores["sources"], "overall": scores["overall"]}
    width = max(map(len, rows))
    return "\n".join(f"{name:{width}}  {_scored(row)}" for name, row in rows.items())


def overall_in_words(scores: Mapping[str, Any]) -> str:
    """The same of all data sources in one line."""
    return _scored(scores["overall"])


def _scored(row: Mapping[str, Any]) -> str:
    """`EM 0.500  F1 0.600  (10 questions, 1.20 searches each, 90% answered)`; an evaluation of a run has no
    searches."""
    words = counted(row["n"], "question")
    if "searches" in row:
        words += f", {row['searches']:.2f} searches each, {row['answered']:.0%} answered"
    # Another measure: of the run's reward, which may ask for more or less than an exact match.
    if "right" in row and abs(row["right"] - row["em"]) >= 0.0005:
        words += f"; by the run's reward {row['right']:.0%} right"
    return f"EM {row['em']:.3f}  F1 {row['f1']:.3f}  ({words})"


def taught_in_words(done: Mapping[str, Any]) -> str:
    """The result of a warm start."""
    return (
        f"{done['demonstrations']:,} demonstrations, {done['steps']:,} optimiser steps: log-prob per token "
        f"{done['logp_first']:.3f} at first, {done['logp_last']:.3f} at last"
    )
