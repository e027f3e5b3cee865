"""Pieces of the tests of `eval --suite`: rows, folders of questions, and finished evaluations without a
model."""

from __future__ import annotations

import json
from pathlib import Path

from services.contracts import Action, Question, Trajectory
from trainer.suite.folder import begin, finish
from trainer.suite.result import result_of
from trainer.suite.rows import ANSWERS_FILE, Asked, row_of
from trainer.suite.sets import SETS, Item, QuestionSet, Suite

PROTOCOL = {"template": "search_r1", "top_k": 3, "max_turns": 4, "retriever": None, "versions": {}}


def asked(name, number, sample=0, golden=("Rome",)):
    question = Question(f"q{number}", f"question {number} of {name}?", golden, name)
    return Asked(Item(f"{name}/q{number}", name, question), sample)


def trajectory_of(one, answer, searches=1):
    """It searches, then answers; None: no answer."""
    actions = [
        Action([1, 2], [-0.5, -0.5], 0, "search", "<search> x </search>", "x", ["d1"])
        for _ in range(searches)
    ]
    text = "no idea" if answer is None else f"<answer> {answer} </answer>"
    actions.append(Action([3], [-0.5], 0, "invalid" if answer is None else "answer", text))
    question = one.item.question
    return Trajectory("u", "g", question, [1], actions, "turns" if answer is None else "answer")


def row(one, answer, searches=1):
    return row_of(one, trajectory_of(one, answer, searches), None)


def evaluation(folder: Path, right: dict[str, list[bool]], *, method="agent", model="m", **protocol) -> Path:
    """A finished evaluation: of each set, which questions are answered rightly."""
    folder.mkdir(parents=True)
    plan = [asked(name, i) for name in SETS for i in range(len(right.get(name, [])))]
    marks = {one.key: right[one.item.set][int(one.item.question.id[1:])] for one in plan}
    rows = [row(one, "Rome" if marks[one.key] else "Oslo") for one in plan]
    (folder / ANSWERS_FILE).write_text("".join(json.dumps(r) + "\n" for r in rows))
    sets = [
        QuestionSet(
            name, "test", tuple(one.item for one in plan if one.item.set == name), len(right[name]), None
        )
        for name in SETS
        if name in right
    ]
    about = {
        "suite": "search7",
        "method": method,
        "model": {"name": model, "weights": None},
        "protocol": PROTOCOL | protocol,
    }
    finish(folder, result_of(Suite(sets), rows, 0, about))
    return folder


__all__ = ["PROTOCOL", "asked", "begin", "evaluation", "row", "trajectory_of"]
