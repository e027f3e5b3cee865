"""Results of commands in words, for a terminal. Programs get the same as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.common.counting import counted
from services.common.shares import change_interval, is_clear
from services.likelihood.monitor.detectors.table import READS

FEW_ANSWERED = 0.5
"""Below this share of complete answers a model does not write the tags."""
_MODES = {"": "greedily", "_sampled": "sampled"}


def run_in_words(summary: Mapping[str, Any]) -> str:
    """The summary of a run: steps, time, phase, the held-out scores that it has with what their noise allows
    to say, and what the reward did."""
    last = summary.get("last_part_seconds")
    part = "" if last is None else f" ({_minutes(last)} of it since the run was resumed)"
    lines = [
        f"{counted(summary.get('steps', 0), 'step')} in {_minutes(summary.get('seconds') or 0)}{part}, "
        f"phase {summary.get('phase', 'unknown')}"
    ]
    if waiting := len(summary.get("undecided", ())):
        lines.append(
            f"{waiting} of {len(READS)} detectors did not have what they need to judge the run: unspiral "
            "monitor replay says what"
        )
    for suffix, how in _MODES.items():
        before = summary.get(f"em_before{suffix}")
        after = summary.get(f"em_after{suffix}")
        if before is not None and after is not None:
            change = change_in_words(before, after, summary.get("em_questions"))
            lines.append(
                f"exact match on held-out questions, {how}: {before:.3f} before, {after:.3f} after ({change})"
            )
    if reward := summary.get("reward"):
        lines.append(f"reward in training: {_mean(reward['first'])}, {_mean(reward['last'])}")
        if apart := _opposite(summary, reward):
            lines.append(apart)
    return "\n".join(lines)


def _minutes(seconds: float) -> str:
    whole, rest = divmod(round(seconds), 60)
    return f"{whole}:{rest:02}"


def change_in_words(before: float, after: float, n: int | None) -> str:
    """How far a change of a held-out score can be trusted. n: its questions, None where nobody kept it."""
    if not n:
        return "the number of questions is not known"
    low, high = interval = change_interval(before, after, n)
    clear = "" if is_clear(interval) else ": no clear change"
    return f"{counted(n, 'question')}, {after - before:+.3f}, 95 % interval {low:+.2f} to {high:+.2f}{clear}"


def _mean(part: Mapping[str, Any]) -> str:
    first, last = part["steps"]
    return f"{part['mean']:.3f} at " + (f"step {last}" if first == last else f"steps {first} to {last}")


def _opposite(summary: Mapping[str, Any], reward: Mapping[str, Any]) -> str | None:
    """A line where the first held-out score that the run has and its reward went opposite ways."""
    suffix = next((s for s in _MODES if summary.get(f"em_before{s}") is not None), None)
    if suffix is None or summary.get(f"em_after{suffix}") is None:
        return None
    score = summary[f"em_after{suffix}"] - summary[f"em_before{suffix}"]
    paid = reward["last"]["mean"] - reward["first"]["mean"]
    if score * paid >= 0:
        return None
    return f"held-out score and reward went opposite ways: {score:+.3f} and {paid:+.3f}"


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
