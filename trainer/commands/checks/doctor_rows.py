"""Rows that lack a column which others of the run's questions have: code of the user's own that reads it
fails when such a row is drawn, which may be hours after the start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from services.common.errors import UserError
from services.contracts import Question
from trainer.config.schema import Config
from trainer.data.named_columns import keys_of
from trainer.data.questions import parsed

LOOKED_AT = 10_000
"""Rows of each file."""
SHOWN = 3
KINDS = 8
"""Most rows that a reward is tried on."""


@dataclass(frozen=True)
class Uneven:
    """Columns that some rows have and others lack."""

    question: Question
    """The first that lacks one."""
    lacking: tuple[str, ...]
    """What it lacks."""
    counts: dict[str, int]
    """Rows that have each of these columns."""
    rows: int

    def __str__(self) -> str:
        shown = [f"`{name}` in {self.counts[name]:,}" for name in self.lacking[:SHOWN]]
        more = ", ..." if len(self.lacking) > SHOWN else ""
        return f"of {self.rows:,} questions that were looked at {', '.join(shown)}{more}"


def uneven_rows(config: Config) -> list[Uneven]:
    """Of data.train and data.eval, as far as they are here and can be read: one for each set of columns,
    KINDS at most. A row may lack one column, and another row the one that is read."""
    counts: Counter[str] = Counter()
    rows = 0
    kinds: dict[frozenset[str], Question] = {}
    """The first question with each set of columns: files have few."""
    for question in _questions(config):
        rows += 1
        names = frozenset(_names(question))
        counts.update(names)
        kinds.setdefault(names, question)
    lacking = {names: tuple(name for name in counts if name not in names) for names in kinds}
    found = [Uneven(kinds[names], lacks, dict(counts), rows) for names, lacks in lacking.items() if lacks]
    return found[:KINDS]


def _names(question: Question) -> Iterator[str]:
    """Its columns and, of those that are dicts, their keys: `extra_info`, `extra_info.level`."""
    columns = question.columns
    yield from columns.left_out  # too long to be kept, and columns of the row all the same
    for name, value in columns.items():
        yield name
        if isinstance(value, dict):
            yield from (f"{name}.{key}" for key in value)


def _questions(config: Config) -> Iterator[Question]:
    for file in (config.data.train, config.data.eval):
        if not file or not Path(file).exists():
            continue
        try:
            rows = parsed(Path(file), keys=keys_of(config.data, file))
            yield from (item[1].question for item in islice(rows, LOOKED_AT) if isinstance(item, tuple))
        except UserError:  # another line says so
            continue
