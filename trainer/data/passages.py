"""The findings of `unspiral data validate` on a corpus: malformed, empty and repeated passages, and texts of
a wrong encoding."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from retriever_service.index_folder.corpus import are_numbered, corpus_files, is_one_file_of_lines
from retriever_service.index_folder.passages import row_of
from retriever_service.index_folder.rows import hash_of
from services.common.errors import UserError
from services.common.records import read_records
from services.common.records.columns import QUESTION, plain_name
from trainer.data.columns import ANSWERS, PROMPT, REWARD

ODD = re.compile("\N{REPLACEMENT CHARACTER}|Ã[\x80-\xbf]|â€|Â[\xa0-\xbf]")
"""What UTF-8 looks like that was read in another encoding and written again."""
SHOWN = 10


@dataclass
class CorpusReport:
    """Counts, and the first of each kind."""

    passages: int = 0
    problems: list[str] = field(default_factory=list)
    malformed: int = 0
    empty: int = 0
    odd: int = 0
    same_ids: int = 0
    same_texts: int = 0
    notes: list[str] = field(default_factory=list)
    numbered: bool = False
    """Whether rows have their numbers as ids."""


def is_corpus(path: Path) -> bool:
    """Whether the first row is a passage. What cannot be read is no corpus: the reading says what is
    wrong."""
    try:
        first = next(read_records(path), None)
        if first is None or first.fields is None:
            return False
        names = {plain_name(name) for name in first.fields}
        asks = not names.isdisjoint((*QUESTION, *PROMPT))
        answers = not names.isdisjoint((*ANSWERS, *REWARD))
        if asks and answers:
            return False  # questions that carry a passage of their own
        return bool(row_of(first.fields, None if asks or answers else 0))
    except (UserError, ValueError):
        return False


def validate_corpus(path: Path, on_rows: Callable[[int], None] = lambda rows: None) -> CorpusReport:
    """Read a whole corpus. Raises UserError only where a file itself cannot be read.

    Takes 16 bytes per passage: hashes of ids and texts, which are compared at the end.
    """
    report = CorpusReport()
    ids = array("Q")
    texts = array("Q")
    numbers = are_numbered(path)
    report.numbered = numbers
    lines = is_one_file_of_lines(corpus_files(path))  # a build numbers these by their lines
    for number, record in enumerate(read_records(path), 1):
        if number % 1000 == 0:
            on_rows(number)
        try:
            if record.fields is None:
                raise ValueError(record.problem)
            row = row_of(record.fields, (record.number if lines else number) - 1 if numbers else None)
        except ValueError as error:
            report.malformed += 1
            if len(report.problems) < SHOWN:
                report.problems.append(f"{record.place}: {error}")
            continue
        report.passages += 1
        ids.append(hash_of(row.id))
        texts.append(hash_of(row.contents))
        if not row.contents.strip():
            report.empty += 1
            _note(report, f"{record.place}: the passage {row.id!r} is empty", report.empty)
        if ODD.search(row.contents):
            report.odd += 1
            text = "the text looks like UTF-8 that was read as another encoding"
            _note(report, f"{record.place}: {text}", report.odd)
    report.same_ids = _repeated(ids)
    report.same_texts = _repeated(texts)
    return report


def _note(report: CorpusReport, text: str, count: int) -> None:
    if count <= SHOWN:
        report.notes.append(text)


def _repeated(hashes: array[int]) -> int:
    """How many stand there again."""
    return len(hashes) - len(np.unique(np.frombuffer(hashes, np.uint64))) if hashes else 0
