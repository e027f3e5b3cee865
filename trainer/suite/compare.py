"""Two results, question by question: paired differences, an exact test, and the answers that flipped."""

from __future__ import annotations

from typing import Any

import numpy as np

from services.common.counting import counted
from services.common.errors import UserError
from services.common.names import accepted
from trainer.suite.finished import Evaluation
from trainer.suite.protocol import NOT_COMPARED, differing, unknown_to_both
from trainer.suite.rows import METRICS, Row
from trainer.suite.sets import in_order
from trainer.suite.statistics import Estimates, sign_test

OF_A_METHOD = {
    "template",
    "prompt_digest",
    "stop",
    "max_turns",
    "max_prompt_tokens",
    "prompts_of_the_data",
    "untagged_text_is_an_answer",
}
"""Facts that another method changes by what it is."""
OF_SEARCHING = {"top_k", "max_obs_tokens", "retriever"}
"""Facts that a method without search has not."""


def compare(first: Evaluation, second: Evaluation, metric: str = "em") -> dict[str, Any]:
    """Second minus first on the questions that both have. JSON-able:

    `sets` (data sources, where neither is a suite's) and `averages`: of each `n`, `first` and `second`
    (means), `difference` (mean, low, high); of each set and of micro also `better` and `worse` (questions)
    and `p` (exact sign test, two-sided); `flipped`: the questions whose score differs; `warnings`: why the
    two may not be comparable. Raises UserError.
    """
    if metric not in METRICS:
        raise UserError(f"--metric {metric}: {accepted(metric, METRICS)}")
    suites = first.result is not None and second.result is not None
    # The keys of a suite hold the set; those of plain evaluations are whatever ids their files had.
    a, b = (one.greedy if suites else one.by_question() for one in (first, second))
    # By key, not as the answers came: the same answers have the same intervals.
    both = [key for key in sorted(a) if key in b and _same(a[key], b[key])]
    if not both:
        raise UserError(f"{first.label} and {second.label}: no question is in both")
    names = b if first.result is None and second.result is not None else a
    by_set: dict[str, list[str]] = {}
    for key in both:
        by_set.setdefault(names[key]["set"], []).append(key)
    # Columns: first, second, difference. The intervals of the difference come from the same rows of both.
    columns: dict[str, np.ndarray] = {}
    for name in in_order(by_set):
        pair = np.array([[_score(rows[key], metric) for rows in (a, b)] for key in by_set[name]], float)
        columns[name] = np.column_stack([pair, pair[:, 1] - pair[:, 0]])
    estimates = Estimates(columns)
    every = np.concatenate([columns[name][:, 2] for name in columns])
    averages = [estimates.averages(column) for column in range(3)]
    return {
        "first": first.label,
        "second": second.label,
        "metric": metric,
        "n": len(both),
        "sets": {
            name: {"n": len(columns[name])}
            | _entry([estimates.of_set(name, column) for column in range(3)])
            | _tested(columns[name][:, 2])
            for name in columns
        },
        "averages": {
            name: _entry([part[name] for part in averages]) | (_tested(every) if name == "micro" else {})
            for name in averages[0]
        },
        "flipped": [
            _flip(name, a[key], b[key], metric)
            for name in columns
            for key in by_set[name]
            if _score(a[key], metric) != _score(b[key], metric)
        ],
        "warnings": [
            *_of_protocols(first, second),
            *_left_out((first.label, a), (second.label, b), len(both)),
        ],
    }


def _score(row: Row, metric: str) -> float:
    return float(row["scores"][metric])


def _same(a: Row, b: Row) -> bool:
    return bool(a["question"] == b["question"] and a["golden_answers"] == b["golden_answers"])


def _entry(columns: list[dict[str, float]]) -> dict[str, Any]:
    return {"first": columns[0]["mean"], "second": columns[1]["mean"], "difference": columns[2]}


def _tested(differences: np.ndarray) -> dict[str, Any]:
    better, worse, p = sign_test(differences.tolist())
    return {"better": better, "worse": worse, "p": p}


def _flip(name: str, a: Row, b: Row, metric: str) -> dict[str, Any]:
    return {
        "key": a["key"],
        "set": name,
        "question": a["question"],
        "golden_answers": a["golden_answers"],
        "scores": [a["scores"][metric], b["scores"][metric]],
        "answers": [a["answer"], b["answer"]],
        "queries": [[search["query"] for search in row["searches"]] for row in (a, b)],
    }


def _of_protocols(first: Evaluation, second: Evaluation) -> list[str]:
    """What makes the difference one of something else than the weights or the method."""
    a, b = first.asked, second.asked
    if a is None or b is None:
        silent = [one.label for one in (first, second) if one.asked is None]
        keep = "keep" if len(silent) > 1 else "keeps"
        return [
            f"{' and '.join(silent)} {keep} no protocol (NAME.protocol.json beside the answers): whether "
            "both were asked in the same way (template, limits, retriever) is not checked"
        ]
    ignored: set[str] = {*NOT_COMPARED}
    if a["method"] != b["method"]:  # another method is another prompt, and may use its turns otherwise
        ignored |= OF_A_METHOD
        if _one_searches_not(a, b):
            ignored |= OF_SEARCHING
    warnings = [f"protocol differs: {line}" for line in differing(a["protocol"], b["protocol"], ignored)]
    if unknown := unknown_to_both(a["protocol"], b["protocol"]):
        warnings.append(f"the retriever of neither told its {', '.join(unknown)}, which may differ")
    return warnings


def _left_out(first: tuple[str, dict[str, Row]], second: tuple[str, dict[str, Row]], both: int) -> list[str]:
    """Questions that are not compared. Each: an evaluation's label, and its rows."""
    warnings = []
    for label, rows in (first, second):
        if len(rows) > both:
            left = counted(len(rows) - both, "question is", "questions are")
            warnings.append(f"{left} left out, which only {label} has")
    a, b = first[1], second[1]
    changed = [row["key"] for key, row in a.items() if key in b and not _same(row, b[key])]
    if changed:
        warnings.append(
            f"{counted(len(changed), 'question has', 'questions have')} other words or golden answers: "
            f"left out, the first is {changed[0]}"
        )
    return warnings


def _one_searches_not(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return (a["protocol"].get("retriever") is None) != (b["protocol"].get("retriever") is None)
