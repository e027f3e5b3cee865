"""The tables of docs/evaluation_measured.md of a real model before and after training, from committed scores.

`python -m benchmarks.real_model.suite` prints them; a test holds the page to them. `suite.json` has a 0 or 1
per question, in the order of the questions' keys, and the estimates that `unspiral eval --suite` wrote. It
has no question and no answer.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np

from benchmarks.real_model.training import HALF_RATE, RESULTS, runs
from trainer.suite.sets import SETS
from trainer.suite.shown.tables import COLUMNS, HEADS, short
from trainer.suite.statistics import Estimates, sign_test

WARM = "warm_agent"
COMPARED = ("llds_s100_agent", "half_s100_agent", "half_s101_agent", "half_s102_agent")
"""Trained policies, each beside the warm start that it began from."""


@cache
def suite() -> dict[str, Any]:
    return json.loads((RESULTS / "suite.json").read_text(encoding="utf-8"))


def label(name: str) -> str:
    """Model, steps of its training, and method."""
    one = suite()["evaluations"][name]
    steps = f", {runs(HALF_RATE)[one['run']]['steps']} steps" if one["run"] else ""
    return f"{one['model']}{steps}: `{one['method']}`"


def table() -> str:
    """Markdown: exact match by set and average, a row per evaluation that came to its end."""
    lines = [
        f"| | {' | '.join(HEADS[column] for column in COLUMNS)} |",
        f"| --- |{' --- |' * len(COLUMNS)}",
    ]
    for name, one in suite()["evaluations"].items():
        if one["em"] is not None:
            cells = (one["em"][column] for column in COLUMNS)
            numbers = (f"{short(c['mean'])} ({short(c['low'])}-{short(c['high'])})" for c in cells)
            lines.append(f"| {label(name)} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def marks(name: str) -> dict[str, np.ndarray]:
    """Of each set a float [n] of 0 and 1, in the order of the questions' keys."""
    right = suite()["evaluations"][name]["right"]
    return {one: np.array([int(mark) for mark in right[one]], float) for one in SETS}


def difference(name: str) -> dict[str, Any]:
    """Trained minus warm start: the `averages`, the set `2wikimultihopqa` (mean, low, high), and `tested`
    (questions that are better, worse, and the exact p) of all questions and of that set."""
    ours, theirs = marks(name), marks(WARM)
    change = {one: ours[one] - theirs[one] for one in SETS}
    columns = {one: np.column_stack([theirs[one], ours[one], change[one]]) for one in SETS}
    estimates = Estimates(columns)
    return {
        "averages": estimates.averages(2),
        "2wikimultihopqa": estimates.of_set("2wikimultihopqa", 2),
        "tested": {
            "all": sign_test(np.concatenate(list(change.values())).tolist()),
            "2wikimultihopqa": sign_test(change["2wikimultihopqa"].tolist()),
        },
    }


def differences() -> str:
    """Markdown: a row per trained policy."""
    lines = [
        "| minus the warm start | General | Multi-hop | Average | Micro | better | worse | p "
        "| 2Wiki | better | worse | p |",
        "| --- " * 12 + "|",
    ]
    for name in COMPARED:
        found = difference(name)
        averages = found["averages"]
        of_all, of_wiki = ((f"{b}", f"{w}", f"{p:.2g}") for b, w, p in found["tested"].values())
        cells = [
            *(_signed(averages[one]) for one in ("general", "multi_hop", "macro", "micro")),
            *of_all,
            _signed(found["2wikimultihopqa"]),
            *of_wiki,
        ]
        lines.append(f"| {label(name).partition(':')[0]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def by_kind(name: str) -> dict[str, tuple[int, int, int]]:
    """Of `yes_no` (questions whose golden answers are yes or no) and `others`: right answers, and against the
    warm start the questions that are better and worse."""
    asked = {one: np.array([mark == "1" for mark in suite()["yes_no"][one]]) for one in SETS}
    found = {}
    for kind, wanted in (("yes_no", True), ("others", False)):
        ours, theirs = (
            np.concatenate([of[one][asked[one] == wanted] for one in SETS])
            for of in (marks(name), marks(WARM))
        )
        better, worse, _ = sign_test((ours - theirs).tolist())
        found[kind] = (int(ours.sum()), better, worse)
    return found


def kinds() -> str:
    """Markdown: a row per agent, by kind of question."""
    asked = "".join(suite()["yes_no"].values())
    lines = [
        f"| | of {asked.count('1')} questions for yes or no: right | answered with yes "
        f"| of the {asked.count('0')} others: right | better than the warm start | worse |",
        "| --- " * 6 + "|",
    ]
    for name in (WARM, *COMPARED):
        found = by_kind(name)
        said = suite()["evaluations"][name]["said_yes"]["yes_no"]
        right, better, worse = found["others"]
        of_others = f"{right} | {better} | {worse}" if name != WARM else f"{right} | - | -"
        lines.append(f"| {label(name).partition(':')[0]} | {found['yes_no'][0]} | {said} | {of_others} |")
    return "\n".join(lines)


def _signed(estimate: dict[str, float]) -> str:
    return f"{estimate['mean']:+.3f} ({estimate['low']:+.3f} to {estimate['high']:+.3f})"


if __name__ == "__main__":
    print(table())
    print()
    print(differences())
    print()
    print(kinds())
