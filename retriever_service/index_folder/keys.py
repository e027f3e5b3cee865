"""Columns of a corpus that its user has named, where it has names of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from services.common.errors import UserError
from services.common.records import plain_name, read_records
from services.common.records.columns import CONTENTS, IDENTITY, column_of, is_missing, value_at

OPTIONS = "--text-key, --title-key and --id-key (of a run: retriever.text_key, .title_key and .id_key)"


@dataclass(frozen=True)
class CorpusKeys:
    """`Description`, or a key in a column: `meta.title`."""

    text: str | None = None
    title: str | None = None
    id: str | None = None

    def __post_init__(self) -> None:
        for name, key in asdict(self).items():
            if key is not None and not key.strip():  # an unset variable, which would not count
                raise UserError(f"--{name}-key (of a run: retriever.{name}_key): is empty; expected a column")

    def __bool__(self) -> bool:
        return any(self.given.values())

    @property
    def given(self) -> dict[str, str]:
        """Those that are set, as an index keeps them."""
        return {name: key for name, key in asdict(self).items() if key}

    def applied(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """The row with the named columns in the place of those that count otherwise; one without a value
        counts as empty."""
        values = {name: value_at(row, key) for name, key in self.given.items()}
        columns = {column_of(row, key): key for key in self.given.values()}
        moved = {own for own, key in columns.items() if own and plain_name(own) == plain_name(key)}
        for name, value in values.items():
            others = {"text": CONTENTS, "title": ("title",), "id": IDENTITY}[name]
            kept = {
                own: held for own, held in row.items() if own not in moved and plain_name(own) not in others
            }
            row = kept | {self._place(name): "" if is_missing(value) else value}
        return row

    def _place(self, name: str) -> str:
        """The column's name among those that are known. The title is put before a `text`, and is a part of
        `contents` already."""
        if name == "text" and self.title is None and plain_name(self.text or "") in ("contents", "content"):
            return "contents"
        return name

    def check(self, path: str | Path) -> None:
        """Raises UserError where the first row has no such column."""
        rows = (one.fields for one in read_records(path) if one.fields is not None)
        first = next(rows, None) if self else None
        if first is None:
            return
        columns = ", ".join(map(str, first)) or "none"
        for name, key in self.given.items():
            if column_of(first, key) is None:
                raise UserError(f"{path}: has no column {key!r}, the {name} key; its columns are {columns}")


NO_KEYS = CorpusKeys()
"""Columns by the names of docs/data.md."""
