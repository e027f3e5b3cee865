"""Question files of any layout (`services.common.records`), told apart by their content and each row's own
columns."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from services.common.counting import SHOWN_LEFT_OUT, malformed
from services.common.errors import UserError
from services.common.records import ACCEPTED, Record, data_files, read_records
from services.common.records.columns import is_no_value
from services.contracts import Question
from trainer.data.columns import Keys, Parsed, question_of
from trainer.data.lists_in_texts import several_in
from trainer.rewards import normalize, unscorable

TRAIN = {"train", "training"}
HELD_OUT = {"dev", "valid", "val", "validation", "eval", "test"}
SPLITS = TRAIN | HELD_OUT
"""File names that say nothing of the source; the folder's name is taken instead."""
ODD = re.compile("\N{REPLACEMENT CHARACTER}|Ã[\x80-\xbf]|â€|Â[\xa0-\xbf]")
"""What UTF-8 looks like that was read in another encoding and written again."""
SHOWN = 10
"""Lines of a kind of note that are shown."""
COUNTED = 100_000
"""Rows behind a malformed one among which others are counted."""
NO_KEYS = Keys()
"""Columns by the names of docs/data.md."""


@dataclass(frozen=True)
class Questions:
    """The rows of a file, in its order."""

    rows: list[Question]
    skipped: int = 0
    """Malformed rows left out."""
    reasons: tuple[str, ...] = ()
    """Of the first of these, each with its place."""


@dataclass(frozen=True)
class BadRow:
    """A row that holds no question."""

    place: str
    reason: str

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


@dataclass
class Report:
    """The findings of `unspiral data validate`."""

    sources: Counter[str] = field(default_factory=Counter)
    """Good rows of each data source."""
    problems: list[str] = field(default_factory=list)
    """One line for each malformed row."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Malformed rows by reason."""
    read_from: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Rows by the columns that held their question and their answers."""
    repeated: list[str] = field(default_factory=list)
    """One line for each question that its data source had before, once normalised."""
    contradicting: list[str] = field(default_factory=list)
    """Those of `repeated` that have no answer in common with the first one."""
    same_ids: list[str] = field(default_factory=list)
    """One line for each row with an id that its data source had before."""
    odd: list[str] = field(default_factory=list)
    """One line for each question or answer that looks like UTF-8 read as another encoding."""
    emptied: list[str] = field(default_factory=list)
    """One line for each row with a golden answer of which scoring leaves nothing."""
    no_value: list[str] = field(default_factory=list)
    """One line for each row whose question, answer, id or source is such as NULL."""
    several: list[str] = field(default_factory=list)
    """One line for each row whose only answer looks like several."""
    first_notes: list[str] = field(default_factory=list)
    """The first SHOWN lines of each kind of note (all but `problems`), in the order of rows."""

    @property
    def good(self) -> int:
        return self.sources.total()

    @property
    def notes(self) -> int:
        """Lines of all kinds of note."""
        kinds = (self.repeated, self.same_ids, self.odd, self.emptied, self.no_value, self.several)
        return sum(map(len, kinds))

    def note(self, kind: list[str], line: str) -> None:
        """Add a line to one of the kinds."""
        kind.append(line)
        if len(kind) <= SHOWN:
            self.first_notes.append(line)

    @property
    def count_line(self) -> str:
        """How many rows are malformed, where their reasons have been told."""
        return f"{len(self.problems):,} of {len(self.problems) + self.good:,} rows are malformed"

    @property
    def total_line(self) -> str:
        """The same with the reason that stands most often."""
        bad, ((reason, count),) = len(self.problems), self.reasons.most_common(1)
        if count == 1 < bad:  # each for a reason of its own
            return f"{self.count_line}; the first: {self.problems[0]}"
        often = "" if count == bad else f", {count:,} of them"
        return f"{self.count_line}{often}: {reason}"


def load_questions(
    path: str | Path, *, skip_bad: bool = False, first: int | None = None, keys: Keys = NO_KEYS
) -> Questions:
    """Read a question file or folder, or its first rows. A malformed row raises UserError; with `skip_bad`
    such rows are left out and counted. keys: columns of other names.

    A file without a single good row is refused either way.
    """
    path = Path(path)
    rows: list[Question] = []
    problems = []
    items = parsed(path, keys=keys)
    for item in islice(items, first):
        if isinstance(item, BadRow):
            if not skip_bad:
                raise refused(item, items, len(rows), "data.skip_bad=true")
            problems.append(item)
        else:
            rows.append(item[1].question)
    if not rows:
        raise UserError(nothing_in(path, problems))
    return read(rows, problems)


def read(rows: list[Question], problems: Sequence[BadRow]) -> Questions:
    """Questions, and what was left out."""
    return Questions(rows, len(problems), tuple(map(str, problems[:SHOWN_LEFT_OUT])))


def refused(
    first: BadRow | UserError,
    rest: Iterator[object],
    before: int,
    how: str,
    what: str = "rows",
) -> UserError:
    """The error for the first malformed row, with the number of those among COUNTED rows behind it. rest:
    these rows, of which malformed ones have the type of the first; before: good rows before it; how: what
    leaves malformed ones out. what: is counted."""
    try:
        later = [isinstance(item, type(first)) for item in islice(rest, COUNTED)]
    except UserError:  # of the file itself, which is told once this row is mended
        return UserError(f"{first}; {how} leaves such {what} out")
    whole = len(later) < COUNTED
    bad, rows = 1 + sum(later), before + 1 + len(later)
    told = malformed(bad, rows, whole=whole, what=what)
    if whole and bad == rows:  # nothing would be left
        return UserError(f"{first}; {told}")
    out = f"such {what}" if not whole else "it" if bad == 1 else f"these {bad:,}"
    return UserError(f"{first}; {told}: {how} leaves {out} out")


def validate(
    path: str | Path,
    *,
    keys: Keys = NO_KEYS,
    on_rows: Callable[[int], None] = lambda rows: None,
    most: int | None = None,
) -> Report:
    """Read the whole file, or `most` rows of it, and count. on_rows: told now and then how many rows are
    read. Raises UserError only where the file cannot be read at all, or is empty."""
    path = Path(path)
    report = Report()
    seen: dict[tuple[str, str], tuple[str, tuple[str, ...]]] = {}
    ids: dict[tuple[str, str], str] = {}
    for number, item in enumerate(islice(parsed(path, keys=keys), most), 1):
        if number % 1000 == 0:
            on_rows(number)
        if isinstance(item, BadRow):
            report.problems.append(str(item))
            report.reasons[item.reason] += 1
            continue
        record, found = item
        report.sources[found.question.data_source] += 1
        report.read_from[found.read_from] += 1
        question = found.question
        answers = question.golden_answers
        first, theirs = seen.setdefault(
            (question.data_source, normalize(question.text)), (record.place, answers)
        )
        if first != record.place:
            line = f"{record.place}: the same question as {first}"
            if {*map(normalize, answers)}.isdisjoint(map(normalize, theirs)):
                line += f", with another answer ({_shown(answers)}; there {_shown(theirs)})"
                report.contradicting.append(f"{line}: {question.text}")
            report.note(report.repeated, f"{line}: {question.text}")
        of_id = ids.setdefault((question.data_source, question.id), record.place)
        if of_id != record.place:
            report.note(report.same_ids, f"{record.place}: the id {question.id!r} is that of {of_id} too")
        if ODD.search("\n".join((question.text, *answers))):
            line = f"{record.place}: looks like UTF-8 read as another encoding: {question.text}"
            report.note(report.odd, line)
        if (emptied := next(filter(unscorable, answers), None)) is not None:
            report.note(
                report.emptied,
                f"{record.place}: of the answer {emptied!r} scoring by em, f1 and subem leaves nothing",
            )
        for what, text in (
            ("question", question.text),
            *(("answer", answer) for answer in answers),
            ("id", question.id),
            ("data source", question.data_source),
        ):
            if is_no_value(text) and text != emptied:
                line = f"{record.place}: the {what} {text!r} is what tables hold where there is nothing"
                report.note(report.no_value, line)
                break
        if len(answers) == 1 and len(parts := several_in(answers[0])) > 1:
            as_list = json.dumps(parts, ensure_ascii=False)
            line = f"{record.place}: {answers[0]!r} is read as one answer; several are written {as_list}"
            report.note(report.several, line)
    if not report.good and not report.problems:
        raise UserError(nothing_in(path, []))
    return report


def _shown(answers: tuple[str, ...]) -> str:
    """Answers in a line."""
    return " | ".join(answers[:3]) + (" | ..." if len(answers) > 3 else "")


def nothing_in(path: Path, problems: list[BadRow]) -> str:
    """The line for a file without a good row."""
    if problems:
        return f"{path}: none of its {len(problems):,} rows is good; the first: {problems[0]}"
    return f"{path}: empty; expected at least one question"


def parsed(
    path: Path, *, all_columns: bool = False, keys: Keys = NO_KEYS
) -> Iterator[tuple[Record, Parsed] | BadRow]:
    """Each row with its question, or the reason why it has none. Columns of Parquet that no question needs
    are read only on request."""
    files = data_files(path, f"questions as {ACCEPTED}")
    _refuse_several_splits(path, files)
    number = 0
    for file in files:
        source = source_of(file)
        for record in read_records(file, None if all_columns else keys.is_wanted):
            yield _parsed_record(record, number, source, keys)
            number += 1


def _parsed_record(record: Record, number: int, source: str, keys: Keys) -> tuple[Record, Parsed] | BadRow:
    if record.fields is None:
        return BadRow(record.place, record.problem)
    try:
        found = question_of(keys.applied(record.fields), number, source, record.names or list(record.fields))
    except UserError as error:
        return BadRow(record.place, keys.in_own_words(str(error), record.fields))
    except RecursionError:
        return BadRow(record.place, "is nested too deep to be read")
    return record, replace(found, read_from=keys.read_from(record.fields, found.read_from))


def _refuse_several_splits(path: Path, files: list[Path]) -> None:
    """Refuse a folder with both `train` and `test`: a run would train on its own evaluation."""
    train = [file.name for file in files if _split_of(file) in TRAIN]
    held_out = [file.name for file in files if _split_of(file) in HELD_OUT]
    if train and held_out:
        raise UserError(
            f"{path}: holds questions to train on ({train[0]}) and held-out ones ({held_out[0]}); "
            "name one of the files"
        )


def _split_of(file: Path) -> str:
    """`train` of `train.jsonl`, `train-00000-of-00002.parquet` and `train/data.jsonl`."""
    stem = file.name.split(".")[0].split("-")[0].split("_")[0].lower()
    return stem if stem in SPLITS else file.parent.name.lower()


def source_of(path: Path) -> str:
    """Data source of rows that name none: the file's name, or its folder's where the file is called test,
    dev, ..."""
    stem = path.name.split(".")[0]
    parent = path.resolve().parent.name
    return parent if stem.lower() in SPLITS and parent else stem
