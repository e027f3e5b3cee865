"""Evaluations that have come to their end, as their files hold them: a suite's folder, or the answers that a
plain `unspiral eval` has kept."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.errors import UserError
from services.common.runs.kept_answers import protocol_file
from services.common.runs.paths import RUNS, TRAJECTORIES, in_runs, is_run
from services.common.users_files import load_object
from trainer.suite.folder import PLAN_FILE
from trainer.suite.result import RESULT_FILE
from trainer.suite.rows import ANSWERS_FILE, GREEDY, Row, rows_to_read
from trainer.suite.sets import drawn, numbered

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
KEPT = f"what `unspiral eval` has kept: a folder with {ANSWERS_FILE}, or a file NAME.answers.jsonl"
EXPECTED = f"expected {KEPT}"


@dataclass(frozen=True)
class Evaluation:
    """A finished evaluation."""

    label: str
    result: dict[str, Any] | None
    """Of a suite; None for a plain `eval`."""
    greedy: dict[str, Row]
    """The greedy rows by key."""
    asked: dict[str, Any] | None = None
    """`method` and `protocol`. None where they were not kept, as by earlier versions of a plain `eval`."""

    def by_question(self) -> dict[str, Row]:
        """The rows by the words of their question; one that stands there again has a number. So rows are
        paired whose keys came from two files, or from a suite and a plain evaluation."""
        rows = [self.greedy[key] for key in sorted(self.greedy)]
        return dict(zip(numbered(row["question"] for row in rows), rows, strict=True))


def load(given: Path) -> Evaluation:
    """The evaluation of a folder, of a file of answers, or of the scores or result beside one. Raises
    UserError where there is none or it has not come to its end."""
    answers = _answers_of(given)
    folder = answers.parent
    if answers.name != ANSWERS_FILE or not ((folder / PLAN_FILE).is_file() or _has_result(folder)):
        return Evaluation(str(given), None, _greedy(answers), _asked(answers))
    if not _has_result(folder):
        raise UserError(
            f"{given}: has no {RESULT_FILE} yet; the same `unspiral eval --suite` command goes on with it"
        )
    result = load_object(folder / RESULT_FILE)
    if not all(key in result for key in NEEDED):
        raise UserError(f"{folder / RESULT_FILE}: expected what `unspiral eval --suite` writes")
    return Evaluation(str(given), result, _of_result(result, _greedy(answers)), result)


def refuse_one_runs_own(results: Sequence[Path]) -> None:
    """Raises UserError, with the command that compares them, where the first two are what one run has kept of
    its training or of the evaluations during it."""
    first, second = (in_runs(given) for given in results[:2])
    folder = first.parent
    if (
        folder == second.parent
        and folder.name == TRAJECTORIES
        and is_run(folder.parent)
        and first.is_file()
        and second.is_file()
    ):
        words = " ".join(shlex.quote(str(word)) for word in (folder.parent, first.stem, second.stem))
        raise UserError(
            f"eval compare: {first.name} and {second.name} are a run's own trajectories; "
            f"`unspiral trajectories diff {words}` compares them"
        )


def kept_evaluations(incomplete: str) -> list[str]:
    """What `load` takes, of the current folder and the runs in runs/, for a shell: folders of answers, and
    files NAME.answers.jsonl."""
    here = [*Path().glob("*.answers.jsonl"), *Path().glob(f"*/{ANSWERS_FILE}")]
    files = [*sorted(here), *sorted(RUNS.glob("*/eval/**/*answers.jsonl"))]
    words = (str(file.parent if file.name == ANSWERS_FILE else file) for file in files)
    return [word for word in words if word.startswith(incomplete)]


def kept_suites(incomplete: str) -> list[str]:
    """Those of them that `load_result` takes."""
    return [word for word in kept_evaluations(incomplete) if _has_result(Path(word))]


def load_result(given: Path) -> dict[str, Any]:
    """The result of a suite's folder. Raises UserError for a plain evaluation, which has none."""
    found = load(given)
    if found.result is None:
        raise UserError(
            f"{given}: holds the answers of an `unspiral eval` without --suite, which has no row in the "
            "table of the papers' sets; `unspiral eval compare A B` compares such answers"
        )
    return found.result


def _asked(answers: Path) -> dict[str, Any] | None:
    """How the answers of a plain `eval` were asked for, where that was kept."""
    file = protocol_file(answers)
    if not file.is_file():
        return None
    kept = load_object(file)
    if not (isinstance(kept.get("method"), str) and isinstance(kept.get("protocol"), dict)):
        raise UserError(f"{file}: expected the method and protocol that `unspiral eval` writes")
    return kept


def _answers_of(given: Path) -> Path:
    """The file of answers that is meant."""
    given = in_runs(given)
    if given.is_dir():
        answers = given / ANSWERS_FILE
        kept = [*given.glob("*.answers.jsonl"), *given.glob("eval/**/*answers.jsonl")]
        advice = f"; there is {sorted(kept)[0]}" if kept else ""
    elif given.name == RESULT_FILE:
        answers, advice = given.parent / ANSWERS_FILE, ""
    elif given.suffix == ".json":
        answers, advice = given.with_suffix(".answers.jsonl"), ""
    else:
        answers, advice = given, ""
    if answers.is_file():
        return answers
    if given.is_dir() and _has_result(given):
        raise UserError(f"{given}: has a {RESULT_FILE} and no {ANSWERS_FILE}, which is compared")
    missing = f"no {answers.name} beside it" if given.is_file() else "no such evaluation"
    if is_run(given):
        missing = "a run's folder, and no evaluation"
    raise UserError(f"{given}: {missing}; {EXPECTED}{advice}")


def _has_result(folder: Path) -> bool:
    return (folder / RESULT_FILE).is_file()


def _greedy(answers: Path) -> dict[str, Row]:
    rows = {row["key"]: row for row in rows_to_read(answers) if row["sample"] == GREEDY}
    if not rows:
        raise UserError(f"{answers}: holds no greedy answer, which is compared")
    return rows


def _of_result(result: dict[str, Any], rows: dict[str, Row]) -> dict[str, Row]:
    """The rows that the result is of: the file holds more where a smaller limit was asked for last."""
    kept: set[str] = set()
    for name, about in result["sets"].items():
        keys = [key for key, row in rows.items() if row["set"] == name]
        kept |= set(keys) if about["seed"] is None else drawn(keys, about["n"], about["seed"])
    return {key: row for key, row in rows.items() if key in kept}
