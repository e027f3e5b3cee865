"""The findings of `unspiral data validate` on a corpus: malformed, empty and repeated passages, and texts of
a wrong encoding."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retriever_service.index_folder.corpus import Places, are_numbered, corpus_files, is_one_file_of_lines
from retriever_service.index_folder.keys import NO_KEYS, CorpusKeys, title_and_text
from retriever_service.index_folder.passages import Row, no_value_in, row_of
from retriever_service.index_folder.remarks import no_id
from retriever_service.index_folder.repeated import again
from retriever_service.index_folder.rows import hash_of
from services.common.counting import counted
from services.common.errors import UserError
from services.common.records import read_records
from services.common.records.columns import QUESTION, plain_name
from services.likelihood.metrics.text_metrics import is_blank
from trainer.data.columns import ANSWERS, PROMPT, REWARD
from trainer.data.questions import ODD

SHOWN = 10
LONG = 1000
"""Words from which on a passage is told of: the papers' have 100, and a search shows some whole ones."""


@dataclass
class CorpusReport:
    """Counts, and the first of each kind."""

    passages: int = 0
    problems: list[str] = field(default_factory=list)
    malformed: int = 0
    empty: int = 0
    title_alone: int = 0
    odd: int = 0
    no_value: int = 0
    """Passages whose text, title or id is what tables hold where there is nothing, such as NULL."""
    no_id: int = 0
    """Passages without an id, in a corpus with ids; their places name them."""
    long: int = 0
    same_ids: int = 0
    same_texts: int = 0
    notes: list[str] = field(default_factory=list)
    numbered: bool = False
    """Whether rows have their numbers as ids."""
    whole: bool = True
    """Whether all rows were read."""

    @property
    def rows(self) -> int:
        """Rows that were read."""
        return self.passages + self.malformed

    @property
    def good(self) -> int:
        """Passages that an index can hold: of those with one id the first."""
        return self.passages - self.same_ids

    @property
    def count_line(self) -> str:
        """How many rows are malformed, and how many have an id that stands before; empty where none is."""
        return self._wrong("")

    @property
    def total_line(self) -> str:
        """The same with the first malformed row."""
        return self._wrong(f"; the first: {self.problems[0]}" if self.malformed else "")

    def _wrong(self, first: str) -> str:
        wrong = []
        if self.malformed:
            bad = f"{self.malformed:,} of {self.malformed + self.passages:,} rows are malformed"
            wrong.append(f"{bad}{first}")
        if self.same_ids:
            again = counted(self.same_ids, "passage has", "passages have")
            wrong.append(f"{again} the id of an earlier one; expected unique ids")
        return "; ".join(wrong)


def is_corpus(path: Path) -> bool:
    """Whether the first row is a passage. What cannot be read is no corpus: the reading says what is
    wrong."""
    try:
        first = next(read_records(path), None)
        if first is None or first.fields is None:
            return False
        asks, answers = _question_in(first.fields)
        if asks and answers:
            return False  # questions that carry a passage of their own
        return bool(row_of(first.fields, None if asks or answers else "0"))
    except (UserError, ValueError):
        return False


def asks_and_answers(path: Path) -> bool:
    """Whether the first row has columns of a question and of its answers, by the names of docs/data.md."""
    with suppress(UserError, ValueError):
        first = next(read_records(path), None)
        return first is not None and first.fields is not None and all(_question_in(first.fields))
    return False


def _question_in(row: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether a row has a column of a question, and one of answers."""
    names = {plain_name(name) for name in row}
    return not names.isdisjoint((*QUESTION, *PROMPT)), not names.isdisjoint((*ANSWERS, *REWARD))


def validate_corpus(
    path: Path,
    on_rows: Callable[[int], None] = lambda rows: None,
    keys: CorpusKeys = NO_KEYS,
    most: int | None = None,
    until: float | None = None,
) -> CorpusReport:
    """Read a whole corpus, or `most` rows of it, or what can be read until a time (of `time.monotonic`); the
    places of repeated rows are not looked for then. Raises UserError only where a file itself cannot be read.

    Takes 16 bytes per passage: hashes of ids and texts, which are compared at the end.
    """
    report = CorpusReport()
    ids = array("Q")
    texts = array("Q")
    keys.check(path)
    numbers = are_numbered(path, keys)
    report.numbered = numbers
    notes: list[tuple[int, str]] = []
    """Each with the number of its row."""

    def note(text: str, count: int) -> None:
        if count <= SHOWN:
            notes.append((report.rows, text))

    for place, row in _rows(path, numbers, keys):
        late = until is not None and report.rows % 100 == 99 and time.monotonic() > until
        if late or report.rows == most:
            report.whole = False
            break
        if report.rows % 1000 == 999:
            on_rows(report.rows + 1)
        if isinstance(row, ValueError):
            report.malformed += 1
            if len(report.problems) < SHOWN:
                report.problems.append(f"{place}: {row}")
            continue
        report.passages += 1
        ids.append(hash_of(row.id))
        texts.append(hash_of(row.contents))
        if not row.contents.strip():
            report.empty += 1
            note(f"{place}: the passage {row.id!r} is empty", report.empty)
        elif is_blank(row.contents):
            report.title_alone += 1
            note(f"{place}: the passage {row.id!r} has a title and no text", report.title_alone)
        if row.placed and not numbers:
            report.no_id += 1
            note(f"{place}: {no_id(row.id)}", report.no_id)
        if (what := no_value_in(*title_and_text(row.contents), row.id)) is not None:
            report.no_value += 1
            note(f"{place}: of the passage {row.id!r} {what}", report.no_value)
        if ODD.search(row.contents):
            report.odd += 1
            text = "the text looks like UTF-8 that was read as another encoding"
            note(f"{place}: {text}", report.odd)
        if (words := len(row.contents.split())) > LONG:
            report.long += 1
            note(f"{place}: the passage {row.id!r} has {words:,} words", report.long)
    same_ids, same_texts = again(ids), again(texts)
    report.same_ids = len(same_ids)
    report.same_texts = len(same_texts)
    if until is not None:
        return report
    twice = ({ids[at] for at in same_ids[:SHOWN]}, {texts[at] for at in same_texts[:SHOWN]})
    notes += _repeated(report, path, keys, *twice)
    report.notes = [line for _, line in sorted(notes, key=lambda note: note[0])]
    return report


def _rows(path: Path, numbers: bool, keys: CorpusKeys) -> Iterator[tuple[str, Row | ValueError]]:
    """The place of each row, and the row or the reason why it is none."""
    lines = is_one_file_of_lines(corpus_files(path))  # a build numbers these by their lines
    places = Places(numbers)
    for number, record in enumerate(read_records(path), 1):
        try:
            if record.fields is None:
                raise ValueError(record.problem)
            yield (
                record.place,
                row_of(
                    keys.applied(record.fields),
                    places.of((record.number if lines else number) - 1),
                    keys.given,
                ),
            )
        except ValueError as error:
            yield record.place, error


def _repeated(
    report: CorpusReport, path: Path, keys: CorpusKeys, ids: set[int], texts: set[int]
) -> Iterator[tuple[int, str]]:
    """Read the corpus again, as far as needed, for the places of a few ids and texts that stand twice, given
    by their hashes. Each line comes with the number of its row."""
    places: dict[str, str] = {}
    left = {"the id of": min(SHOWN, report.same_ids), "the text of": min(SHOWN, report.same_texts)}
    rows = _rows(path, report.numbered, keys) if any(left.values()) else ()
    for number, (place, row) in enumerate(rows, 1):
        if isinstance(row, ValueError):
            continue
        for what, hashes, value in (("the id of", ids, row.id), ("the text of", texts, row.contents)):
            if not left[what] or hash_of(value) not in hashes:
                continue
            first = places.setdefault(what + value, place)
            if first != place:
                left[what] -= 1
                yield number, f"{place}: the passage {row.id!r} has {what} {first}"
        if not any(left.values()):
            return
