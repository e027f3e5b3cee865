"""The questions that a configuration names, read by the columns that it names."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from services.common.errors import UserError
from services.common.records.columns import column_of, columns_told
from trainer.config.data_settings import DataSettings
from trainer.data import models
from trainer.data.columns import Keys, first_row
from trainer.data.questions import Questions, load_questions


def named_in(data: DataSettings) -> Keys:
    """All columns that a configuration names."""
    keep = None if data.keep_columns is None else tuple(data.keep_columns)
    return Keys(data.question_key, data.answer_key, data.source_key, data.id_key, data.null_is_empty, keep)


def keys_of(data: DataSettings, file: str | Path) -> Keys:
    """Columns by which a file of questions is read: `data.train`, `data.eval` or one in their place. A
    column counts where the file has it; one that neither it nor the other of them has is a mistake, unless
    the other is not here yet. Raises UserError."""
    return _counting(named_in(data), file, _other(data, str(file)))


def _other(data: DataSettings, file: str) -> str | None:
    """Which of `data.train` and `data.eval` the same columns are named for, beside a file."""
    return data.eval if file == data.train else data.train


def _counting(keys: Keys, file: str | Path, other: str | None) -> Keys:
    """Of the keys those that count in a file. Raises UserError."""
    if not (keys or keys.keep) or not Path(file).exists():
        return keys
    if other and not Path(other).exists():  # on the hub, say: what it has is not known
        return keys.of_file(file)
    _check_kept(keys.keep or (), file, *([other] if other else []))
    counting = keys.beside(file, other) if other else keys
    counting.check(file)
    return counting


def _check_kept(columns: Sequence[str], *files: str | Path) -> None:
    """Raises UserError for a column of `data.keep_columns` that the first row of no file has."""
    firsts = [row for file in files if (row := first_row(file))]
    for key in columns:
        if firsts and all(column_of(row, key) is None for row in firsts):
            told = columns_told(firsts[0], key)
            raise UserError(f"data.keep_columns: {files[0]} has no column {key!r}; its columns are {told}")


def questions_in(data: DataSettings, file: str, *, first: int | None = None) -> Questions:
    """The questions of a file, or its first ones; what is on the hub is fetched, and so is the other file of
    the configuration where this one lacks a column that is named. Raises as `load_questions`."""
    found = models.resolve_file(file)
    keys, other = named_in(data), _other(data, file)
    if other and _lacks_some(keys, found):
        other = models.resolve_file(other)
    return load_questions(found, skip_bad=data.skip_bad, first=first, keys=_counting(keys, found, other))


def _lacks_some(keys: Keys, file: str) -> bool:
    named = (*keys.given.values(), *(keys.keep or ()))
    if not named or not Path(file).exists():
        return False
    row = first_row(file) or {}
    return any(column_of(row, key) is None for key in named)


def validating(file: str, against: str | None = None, **keys: str | bool | None) -> str:
    """The command that lists what is wrong with a file, for messages. keys: columns by the options that name
    them, such as `question`, and `null_is_empty`."""
    words = ["unspiral", "data", "validate", file, *(["--against", against] if against else [])]
    for name, column in keys.items():
        if isinstance(column, str) and column:
            words += [f"--{name}-key", column]
    words += ["--null-is-empty"] if keys.get("null_is_empty") else []
    return shlex.join(words)
