"""Results of commands in words, for a terminal. Programs get the same as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.common.counting import counted

FEW_ANSWERED = 0.5
"""Below this share of complete answers a model does not write the tags."""
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
    return f"EM {row['em']:.3f}  F1 {row['f1']:.3f}  ({words})"


def unsearched_in_words(scores: Mapping[str, Any], config: object) -> str:
    """What helps a model that never searched; empty for one that did. config: the file of the
    configuration."""
    row = scores["overall"]
    if not row["n"] or row.get("searches", 1):  # an evaluation of a run has no such count
        return ""
    what = "writes no tags" if row["answered"] < FEW_ANSWERED else "answers without searching"
    return (
        f"0 searches in {counted(row['n'], 'question')}: the model {what}; a warm start teaches it to search"
        f": unspiral warm-start --config {config} --out models/taught"
    )


def taught_in_words(done: Mapping[str, Any]) -> str:
    """The result of a warm start."""
    return (
        f"{done['demonstrations']:,} demonstrations, {done['steps']:,} optimiser steps: log-prob per token "
        f"{done['logp_first']:.3f} at first, {done['logp_last']:.3f} at last"
    )
