"""Two results, question by question: paired differences, an exact test, and the answers that flipped."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from services.common.counting import counted
from services.common.errors import UserError
from services.common.names import accepted
from services.common.users_files import load_object
from trainer.suite.protocol import NOT_COMPARED, differing, unknown_to_both
from trainer.suite.result import RESULT_FILE
from trainer.suite.rows import ANSWERS_FILE, GREEDY, METRICS, Row, read_rows
from trainer.suite.sets import SETS, drawn
from trainer.suite.statistics import Estimates, sign_test

NEEDED = (
    "suite",
    "method",
    "model",
    "protocol",
    "sets",
    "sources",
    "averages",
    "interval",
    "n",
    "missing_sets",
)
"""Keys of a result."""
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


@dataclass(frozen=True)
class Evaluation:
    """A finished evaluation, as its folder holds it."""

    label: str
    result: dict[str, Any]
    greedy: dict[str, Row]
    """The greedy rows by key."""


def load(given: Path) -> Evaluation:
    """The evaluation of a folder, or of its result.json or answers.jsonl. Raises UserError where there is
    none or it has not come to its end."""
    folder = given.parent if given.is_file() else given
    if not (folder / RESULT_FILE).is_file():
        unfinished = (folder / ANSWERS_FILE).is_file()
        raise UserError(
            f"{given}: "
            + (
                f"has no {RESULT_FILE} yet; the same `unspiral eval --suite` command goes on with it"
                if unfinished
                else "no such evaluation; expected a folder that `unspiral eval --suite` wrote"
            )
        )
    result = load_object(folder / RESULT_FILE)
    if not all(key in result for key in NEEDED):
        raise UserError(f"{folder / RESULT_FILE}: expected what `unspiral eval --suite` writes")
    rows = {row["key"]: row for row in read_rows(folder / ANSWERS_FILE) if row["sample"] == GREEDY}
    return Evaluation(str(given), result, _of_result(result, rows))


def _of_result(result: dict[str, Any], rows: dict[str, Row]) -> dict[str, Row]:
    """The rows that the result is of: the file holds more where a smaller limit was asked for last."""
    kept: set[str] = set()
    for name, about in result["sets"].items():
        keys = [key for key, row in rows.items() if row["set"] == name]
        kept |= set(keys) if about["seed"] is None else drawn(keys, about["n"], about["seed"])
    return {key: row for key, row in rows.items() if key in kept}


def compare(first: Evaluation, second: Evaluation, metric: str = "em") -> dict[str, Any]:
    """Second minus first on the questions that both have. JSON-able:

    `sets` and `averages`: of each `n`, `first` and `second` (means), `difference` (mean, low, high); of each
    set and of micro also `better` and `worse` (questions) and `p` (exact sign test, two-sided); `flipped`:
    the questions whose score differs; `warnings`: why the two may not be comparable. Raises UserError.
    """
    if metric not in METRICS:
        raise UserError(f"--metric {metric}: {accepted(metric, METRICS)}")
    # By key, not as the answers came: the same answers have the same intervals.
    both = [
        key
        for key in sorted(first.greedy)
        if key in second.greedy and _same(first.greedy[key], second.greedy[key])
    ]
    if not both:
        raise UserError(f"{first.label} and {second.label}: no question is in both")
    by_set: dict[str, list[str]] = {name: [] for name in SETS}
    for key in both:
        by_set[first.greedy[key]["set"]].append(key)
    scores = {
        name: np.array([[_score(one, key, metric) for one in (first, second)] for key in keys], float)
        for name, keys in by_set.items()
        if keys
    }
    # Columns: first, second, difference. The intervals of the difference come from the same rows of both.
    columns = {name: np.column_stack([pair, pair[:, 1] - pair[:, 0]]) for name, pair in scores.items()}
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
            _flip(first.greedy[key], second.greedy[key], metric)
            for name in columns
            for key in by_set[name]
            if _score(first, key, metric) != _score(second, key, metric)
        ],
        "warnings": _warnings(first, second, len(both)),
    }


def _score(one: Evaluation, key: str, metric: str) -> float:
    return float(one.greedy[key]["scores"][metric])


def _same(a: Row, b: Row) -> bool:
    return bool(a["question"] == b["question"] and a["golden_answers"] == b["golden_answers"])


def _entry(columns: list[dict[str, float]]) -> dict[str, Any]:
    return {"first": columns[0]["mean"], "second": columns[1]["mean"], "difference": columns[2]}


def _tested(differences: np.ndarray) -> dict[str, Any]:
    better, worse, p = sign_test(differences.tolist())
    return {"better": better, "worse": worse, "p": p}


def _flip(a: Row, b: Row, metric: str) -> dict[str, Any]:
    return {
        "key": a["key"],
        "set": a["set"],
        "question": a["question"],
        "golden_answers": a["golden_answers"],
        "scores": [a["scores"][metric], b["scores"][metric]],
        "answers": [a["answer"], b["answer"]],
        "queries": [[search["query"] for search in row["searches"]] for row in (a, b)],
    }


def _warnings(first: Evaluation, second: Evaluation, both: int) -> list[str]:
    """What makes the difference one of something else than the weights or the method."""
    warnings = []
    a, b = first.result, second.result
    ignored: set[str] = {*NOT_COMPARED}
    if a["method"] != b["method"]:  # another method is another prompt, and may use its turns otherwise
        ignored |= OF_A_METHOD
        if _one_searches_not(a, b):
            ignored |= OF_SEARCHING
    warnings += [f"protocol differs: {line}" for line in differing(a["protocol"], b["protocol"], ignored)]
    if unknown := unknown_to_both(a["protocol"], b["protocol"]):
        warnings.append(f"the retriever of neither told its {', '.join(unknown)}, which may differ")
    for label, one in ((first.label, first), (second.label, second)):
        if len(one.greedy) > both:
            left = counted(len(one.greedy) - both, "question is", "questions are")
            warnings.append(f"{left} left out, which only {label} has")
    changed = [
        key
        for key, row in first.greedy.items()
        if key in second.greedy and not _same(row, second.greedy[key])
    ]
    if changed:
        warnings.append(
            f"{counted(len(changed), 'question has', 'questions have')} other words or golden answers: "
            f"left out, the first is {changed[0]}"
        )
    return warnings


def _one_searches_not(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return (a["protocol"].get("retriever") is None) != (b["protocol"].get("retriever") is None)
