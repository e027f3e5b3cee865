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
    column counts where the file has it; one that neither it nor the other of them has is a mistake. Raises
    UserError. file: as it is given, or where it lies."""
    keys = named_in(data)
    if not (keys or keys.keep) or not Path(file).exists():
        return keys
    other = data.eval if str(file) == data.train else data.train
    _check_kept(keys.keep or (), file, *([other] if other else []))
    counting = keys.beside(file, other) if other and Path(other).exists() else keys
    counting.check(file)
    return counting


def _check_kept(columns: Sequence[str], *files: str | Path) -> None:
    """Raises UserError for a column of `data.keep_columns` that the first row of no file has."""
    firsts = [row for file in files if Path(file).exists() and (row := first_row(file))]
    for key in columns:
        if firsts and all(column_of(row, key) is None for row in firsts):
            told = columns_told(firsts[0], key)
            raise UserError(f"data.keep_columns: {files[0]} has no column {key!r}; its columns are {told}")


def questions_in(data: DataSettings, file: str, *, first: int | None = None) -> Questions:
    """The questions of a file, or its first ones; what is on the hub is fetched. Raises as
    `load_questions`."""
    found = models.resolve_file(file)
    keys = keys_of(data, file if Path(file).exists() else found)
    return load_questions(found, skip_bad=data.skip_bad, first=first, keys=keys)


def validating(file: str, against: str | None = None, **keys: str | bool | None) -> str:
    """The command that lists what is wrong with a file, for messages. keys: columns by the options that name
    them, such as `question`, and `null_is_empty`."""
    words = ["unspiral", "data", "validate", file, *(["--against", against] if against else [])]
    for name, column in keys.items():
        if isinstance(column, str) and column:
            words += [f"--{name}-key", column]
    words += ["--null-is-empty"] if keys.get("null_is_empty") else []
    return shlex.join(words)
