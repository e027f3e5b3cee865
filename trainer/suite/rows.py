"""Answers as they are kept: one row for each question and sample, in `answers.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from services.common.errors import UserError
from services.common.files import lock, named
from services.common.runs.paths import TRAJECTORIES
from services.common.users_files import reading
from services.contracts import Trajectory
from trainer.rewards import final_answer, make_reward
from trainer.suite.sets import Item

METRICS = ("em", "f1", "subem", "em_strict", "em_search_r1")
"""Scores of a row; docs/algorithms.md, "Scoring", says what each calls right."""
GREEDY = 0
"""The sample of temperature 0; those at the run's temperature are numbered from 1."""
ANSWERS_FILE = "answers.jsonl"
Key = tuple[str, int]
"""A question's key, and its sample."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """One question, to be answered once."""

    item: Item
    sample: int

    @property
    def key(self) -> Key:
        return self.item.key, self.sample


def planned(items: Iterable[Item], samples: int) -> list[Asked]:
    """All that is to be answered, greedy first: `samples` more answers for each question."""
    items = list(items)
    return [Asked(item, sample) for sample in range(samples + 1) for item in items]


def row_of(
    asked: Asked, trajectory: Trajectory, documents: list[str] | None, *, untagged: bool = False
) -> Row:
    """The row of a finished trajectory. documents: ids of those in the prompt, where the method retrieved
    some; untagged: whether a text without tags is an answer as a whole."""
    question = asked.item.question
    scored = _as_answer(trajectory) if untagged and final_answer(trajectory) is None else trajectory
    first = [] if documents is None else [{"query": question.text, "documents": documents}]
    searches = [
        {"query": action.query, "documents": action.document_ids}
        for action in trajectory.actions
        if action.document_ids is not None
    ]
    return {
        "key": asked.item.key,
        "sample": asked.sample,
        "set": asked.item.set,
        "id": question.id,
        "question": question.text,
        "golden_answers": list(question.golden_answers),
        "answer": final_answer(scored),
        "scores": {metric: make_reward(metric)(scored) for metric in METRICS},
        "finish": trajectory.finish,
        "searches": first + searches,
        "text": trajectory.model_text,
        "tokens": sum(len(action.token_ids) for action in trajectory.actions),
        "prompt_tokens": len(trajectory.prompt_ids),
    }


def _as_answer(trajectory: Trajectory) -> Trajectory:
    """The same with all of its text as the answer; unchanged where that is blank."""
    (action,) = trajectory.actions
    text = action.text.strip()
    answer = replace(action, text=f"<answer>{text}</answer>", kind="answer")
    return replace(trajectory, segments=[answer]) if text else trajectory


def read_rows(path: Path) -> list[Row]:
    """Whole rows of an answers file, in its order. A last line without a line break, which a kill cut short,
    is left out. Raises UserError for a line that is no row, and for a row that comes twice."""
    with reading(path, "rows of answers"):
        return _rows_of(path, path.read_bytes().split(b"\n")[:-1])


def rows_to_read(path: Path) -> list[Row]:
    """The same of a file that nothing is added to: a last line without a line break counts where it is a
    whole row, as an editor or `head -c` leaves it."""
    with reading(path, "rows of answers"):
        *lines, last = path.read_bytes().split(b"\n")
    return _rows_of(path, [*lines, last] if last and _row(last) else lines)


def _rows_of(path: Path, lines: list[bytes]) -> list[Row]:
    rows: list[Row] = []
    seen: set[Key] = set()
    for number, line in enumerate(lines, 1):
        if (row := _row(line)) is None:
            no_row = f"{path}, line {number}: not a row of answers that `unspiral eval` writes"
            raise UserError(f"{no_row}{_of_training(path, line) or _lacking(line)}")
        key = (row["key"], row["sample"])
        if key in seen:
            raise UserError(f"{path}, line {number}: {key[0]}, sample {key[1]}, comes a second time")
        seen.add(key)
        rows.append(row)
    return rows


def _lacking(line: bytes) -> str:
    """The end of a message about a line that is an object, and no row for want of keys."""
    try:
        row = json.loads(line)
    except ValueError:
        return ""
    if not isinstance(row, dict):
        return ""
    scores = row.get("scores")
    lacking = [f"`{key}`" for key in _KEYS if key not in row]
    lacking += [f"`scores.{m}`" for m in METRICS if isinstance(scores, dict) and m not in scores]
    return f"; it lacks {', '.join(lacking)}" if lacking else ""


_KEYS = ("key", "set", "sample", "question", "answer", "golden_answers", "searches", "scores")
"""What a row has at least."""


def _row(line: bytes) -> Row | None:
    """The row that a line holds; None where it holds none, or one that commands would stumble over."""
    try:
        row = json.loads(line)
        texts = (row["key"], row["set"], row["question"], row["answer"] or "", *row["golden_answers"])
        fits = all(isinstance(text, str) for text in texts) and isinstance(row["golden_answers"], list)
        fits = fits and type(row["sample"]) is int and all("query" in search for search in row["searches"])
        fits = fits and all(_is_score(row["scores"][metric]) for metric in METRICS)
        if b"\\u" in line:  # half a pair of surrogates is no text, and can't be printed
            json.dumps(row, ensure_ascii=False).encode()
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return row if fits else None


def _of_training(path: Path, line: bytes) -> str:
    """`, but a trajectory of a run; ...` where training has kept the line, or an evaluation during it; empty
    for any other."""
    try:
        row = json.loads(line)
        is_trajectory = {"uid", "segments", "finish"} <= row.keys()
    except (ValueError, AttributeError, RecursionError):
        return ""
    if not is_trajectory:
        return ""
    of_run = path.parent.name == TRAJECTORIES
    run, name = (path.parent.parent, path.stem) if of_run else ("RUN", "A")
    return (
        f", but a trajectory of a run; `unspiral trajectories diff {run} {name} OTHER` compares two such "
        "files of one run, and what `unspiral eval --checkpoint RUN` keeps is compared here"
    )


def _is_score(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value <= 1


def _light(row: Row) -> Row:
    """Without the text: hundreds of thousands of rows are held."""
    return {name: value for name, value in row.items() if name != "text"}


class AnswersFile:
    """`answers.jsonl` of a folder, open to be gone on with; one process at a time.

    Each row is handed to the system when it is added, so a killed process loses none. `kept`: the rows that
    were there. Raises UserError where another process writes, and where a kept row is of another question.
    """

    def __init__(self, folder: Path, plan: list[Asked]):
        self.path = folder / ANSWERS_FILE
        taken = f"{folder}: another evaluation writes its answers there"
        self._lock = lock(folder / f"{ANSWERS_FILE}.lock", lambda holder: UserError(taken + holder))
        self._file = self.path.open("ab")
        self.kept = {(row["key"], row["sample"]): _light(row) for row in read_rows(self.path)}
        changed = next((asked for asked in plan if self._is_another(asked)), None)
        if changed is not None:
            self.close()
            raise UserError(
                f"{self.path}: its row {changed.item.key} is another question, or has other golden answers, "
                "than the data now; give another --out"
            )
        whole = self.path.read_bytes().rfind(b"\n") + 1
        self._file.truncate(whole)

    def _is_another(self, asked: Asked) -> bool:
        row = self.kept.get(asked.key)
        question = asked.item.question
        now = (question.text, list(question.golden_answers))
        return row is not None and (row["question"], row["golden_answers"]) != now

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()
        self._lock.close()

    def add(self, row: Row) -> None:
        """Append a row. One that is there already is an error of ours."""
        key = (row["key"], row["sample"])
        if key in self.kept:
            raise ValueError(f"{key} is answered already")
        with named(self.path):
            self._file.write(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
            self._file.flush()
        self.kept[key] = _light(row)

    def rows(self, plan: list[Asked]) -> list[Row]:
        """The rows of a plan, in its order, whatever order they were written in."""
        return [self.kept[asked.key] for asked in plan]
