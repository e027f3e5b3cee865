"""Answers in a run's folder: those of `unspiral eval`, and those to the held-out questions of training.

A file has one JSON object a line. `unspiral eval` writes its scores beside each answer (trainer/suite/rows.py
has the keys); a run writes trajectories, whose reward in these files is the exact match.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

from services.common.files import hints
from services.common.runs.kept_answers import protocol_file, stem_of
from services.common.runs.paths import TRAJECTORIES
from services.common.shares import wilson

PLAN = "plan.json"
"""Beside the answers of a suite, which has a page of its own."""
OF_TRAINING = "eval_*.jsonl"
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.S)


@dataclass(frozen=True)
class Answer:
    """One answer, as a page shows it."""

    question: str
    golden: tuple[str, ...]
    answer: str | None
    right: bool
    source: str
    finish: str
    f1: float | None
    searches: tuple[tuple[str, tuple[str, ...]], ...]
    """What was asked of the retriever, and the ids of the documents that came; of a trajectory none: its text
    has both."""
    written: tuple[tuple[str, str], ...]
    """Who wrote, `model` or `environment`, and what."""


@dataclass(frozen=True)
class Scores:
    """Means over some answers."""

    n: int
    em: float
    f1: float | None
    searches: float
    answered: float

    @property
    def interval(self) -> tuple[float, float]:
        """Of the exact match, 95 %."""
        return wilson(self.em, self.n)

    def told(self) -> dict[str, Any]:
        """For programs."""
        low, high = self.interval
        return {
            "n": self.n,
            "em": {"mean": self.em, "low": low, "high": high},
            "f1": self.f1,
            "searches": self.searches,
            "answered": self.answered,
        }


@dataclass(frozen=True)
class Kept:
    """The answers of a file, without their texts."""

    file: Path
    scores: Scores
    sources: Mapping[str, Scores]
    places: tuple[tuple[int, bool, str], ...]
    """Of each answer: where its line begins, whether it is right, and its source."""
    questions: tuple[int, ...]
    """Of each answer the hash of its question and of what is accepted, to find it in another file."""

    def read(self, places: list[int]) -> Iterator[Answer]:
        """The answers whose lines begin there."""
        with open(self.file, "rb") as lines:
            for place in places:
                lines.seek(place)
                if found := answer_of(lines.readline()):
                    yield found


def own_files(folder: Path) -> dict[str, Path]:
    """The answers of `unspiral eval` without a suite, by name: `answers` for `eval/answers.jsonl`, `held` for
    `eval/held.answers.jsonl` and for `held.answers.jsonl` in the run's folder."""
    found: dict[str, Path] = {}
    files = [*folder.glob("eval/*.jsonl"), *folder.glob("eval/*/*.jsonl"), *folder.glob("*.answers.jsonl")]
    for file in sorted(files):
        if (file.parent / PLAN).is_file() or (file.parent / "result.json").is_file() or kept_in(file) is None:
            continue
        inside = file.parent if file.parent.parent.name == "eval" else None
        name = ".".join(part for part in (inside.name if inside else "", stem_of(file)) if part) or "answers"
        while name in found:
            name += "-2"
        found[name] = file
    return found


def training_files(folder: Path) -> dict[str, Path]:
    """The answers to the held-out questions of training, by the name that `unspiral trajectories` knows."""
    return {file.stem: file for file in sorted((folder / TRAJECTORIES).glob(OF_TRAINING))}


def protocol_of(answers: Path) -> dict[str, Any]:
    """How the answers were asked for: `method`, `model`, `protocol`; empty where it was not kept."""
    return hints(protocol_file(answers))


def kept_in(file: Path) -> Kept | None:
    """What a file holds; None where no line of it is an answer. Read again once the file has changed."""
    try:
        stat = file.stat()
        return _kept(file, stat.st_mtime_ns, stat.st_size)
    except OSError:
        return None


@lru_cache(maxsize=64)
def _kept(file: Path, changed: int, size: int) -> Kept | None:
    places: list[tuple[int, bool, str]] = []
    questions: list[int] = []
    light: dict[str, list[tuple[float, float | None, int, bool]]] = defaultdict(list)
    at = 0
    with open(file, "rb") as lines:
        for line in lines:
            if one := answer_of(line):
                places.append((at, one.right, one.source))
                questions.append(hash((one.question, one.golden)))
                asked = len(one.searches) or sum(by == "environment" for by, _ in one.written)
                light[one.source].append((float(one.right), one.f1, asked, one.answer is not None))
            at += len(line)
    if not places:
        return None
    sources = {name: _scores(rows) for name, rows in sorted(light.items())}
    whole = _scores([row for rows in light.values() for row in rows])
    return Kept(file, whole, sources, tuple(places), tuple(questions))


def _scores(rows: list[tuple[float, float | None, int, bool]]) -> Scores:
    em, f1, searches, answered = zip(*rows, strict=True)
    known = [value for value in f1 if value is not None]
    return Scores(len(rows), fmean(em), fmean(known) if known else None, fmean(searches), fmean(answered))


def answer_of(line: bytes) -> Answer | None:
    """The answer that a line holds; None for one that holds none, and for a sampled one of several."""
    try:
        row = json.loads(line)
        return _of_trajectory(row) if "segments" in row else _of_row(row)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _of_row(row: dict[str, Any]) -> Answer | None:
    if row.get("sample", 0) != 0:
        return None
    scores = row["scores"]
    searches = [(_text(s["query"]), tuple(map(str, s.get("documents") or ()))) for s in row["searches"]]
    return Answer(
        _text(row["question"]),
        tuple(map(str, row["golden_answers"])),
        None if row["answer"] is None else _text(row["answer"]),
        scores["em"] == 1,
        _text(row["set"]),
        _text(row.get("finish", "")),
        float(scores["f1"]),
        tuple(searches),
        (("model", _text(row.get("text", ""))),),
    )


def _of_trajectory(row: dict[str, Any]) -> Answer:
    written = tuple((_text(s["by"]), _text(s["text"])) for s in row["segments"])
    return Answer(
        _text(row["question"]),
        tuple(map(str, row["golden_answers"])),
        _answer_in(row, written),
        row["reward"] == 1,
        _text(row.get("data_source") or ""),
        _text(row.get("finish", "")),
        None,
        (),
        written,
    )


def _answer_in(row: dict[str, Any], written: Sequence[tuple[str, str]]) -> str | None:
    """The one that the reward read. In files of earlier versions it stands in the text alone."""
    if "answer" in row:
        return None if row["answer"] is None else _text(row["answer"])
    said = _ANSWER.findall("\n".join(text for by, text in written if by == "model"))
    return said[-1].strip() if said else None


def _text(value: Any) -> str:
    """Half a pair of surrogates is no text that can be sent."""
    return str(value).encode("utf-8", "replace").decode("utf-8")
