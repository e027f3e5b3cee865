"""One held-out question before and after a run, as its evaluations kept it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from services.common.counting import counted
from services.common.files import json_lines
from services.common.runs.paths import TRAJECTORIES


def next_commands(run: Path, index: Path) -> list[str]:
    """What to try after a demo. index: that of the held-out questions."""
    shown = _shown(run)
    question = shlex.quote(shown[1]["question"]) if shown else "QUESTION"
    return [
        f"unspiral ask --checkpoint {run} --retriever {index} {question}    # or one of your own",
        f"unspiral serve likelihood --store {run}    # its live page again",
        f"unspiral trajectories diff {run} eval_before_greedy eval_after_greedy    # every question",
        "unspiral init --model MODEL --data QUESTIONS --corpus CORPUS    # your own (docs/tutorial.md)",
    ]


def before_after(run: Path) -> list[str]:
    """Lines that show one question and what the policy wrote for it, with its searches, before and after the
    run: one that was wrong and became right, with the most searches of the first such; otherwise the first
    question. Empty where no evaluation was kept."""
    shown = _shown(run)
    if shown is None:
        return []
    before, after = shown
    answers = " or ".join(before["golden_answers"])
    return [
        f"one question: {before['question']}  (answer: {answers})",
        "  before:",
        *_told(before),
        "  after:",
        *_told(after),
    ]


def _shown(run: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The trajectories before and after of the question that is shown."""
    before = {t["uid"].rpartition("-")[2]: t for t in _kept(run, "before")}
    after = {t["uid"].rpartition("-")[2]: t for t in _kept(run, "after")}
    both = [name for name in after if name in before]
    if not both:
        return None
    learnt = [name for name in both if not before[name]["reward"] and after[name]["reward"]]
    name = max(learnt or both[:1], key=lambda name: _searches(after[name]))
    return before[name], after[name]


def _kept(run: Path, when: str) -> list[dict[str, Any]]:
    return json_lines(run / TRAJECTORIES / f"eval_{when}_greedy.jsonl")


def _searches(trajectory: dict[str, Any]) -> int:
    return sum(segment.get("documents") is not None for segment in trajectory["segments"])


def _told(trajectory: dict[str, Any]) -> Iterator[str]:
    for segment in trajectory["segments"]:
        yield f"    {' '.join(segment['text'].split()) or '(nothing)'}"
    searches = counted(_searches(trajectory), "search", "searches")
    yield f"    -> {'right' if trajectory['reward'] else 'wrong'}, {searches}"
