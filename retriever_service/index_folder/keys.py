"""Columns of a corpus that its user has named, where it has names of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.errors import UserError
from services.common.records import read_records
from services.common.records.columns import (
    CONTENTS,
    IDENTITY,
    column_of,
    columns_told,
    is_missing,
    is_no_value,
    plain_name,
    value_at,
)

OPTIONS = "--text-key, --title-key and --id-key (of a run: retriever.text_key, .title_key and .id_key)"


@dataclass(frozen=True)
class CorpusKeys:
    """`Description`, or a key in a column: `meta.title`."""

    text: str | None = None
    title: str | None = None
    id: str | None = None
    null_is_empty: bool = False
    """Whether cells such as NULL, of these columns or those that are known, count as empty."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> CorpusKeys:
        """Those that an index was built with."""
        return cls(**settings.get("columns", {}), null_is_empty=settings.get("null_is_empty", False))

    @property
    def _named(self) -> dict[str, str | None]:
        return {"text": self.text, "title": self.title, "id": self.id}

    def __post_init__(self) -> None:
        for name, key in self._named.items():
            if key is not None and not key.strip():  # an unset variable, which would not count
                raise UserError(f"--{name}-key (of a run: retriever.{name}_key): is empty; expected a column")

    def __bool__(self) -> bool:
        return any(self.given.values())

    @property
    def given(self) -> dict[str, str]:
        """Those that are set, as an index keeps them."""
        return {name: key for name, key in self._named.items() if key}

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
        if self.null_is_empty:
            row = {own: _without_null(plain_name(own), held) for own, held in row.items()}
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
        for name, key in self.given.items():
            if column_of(first, key) is None:
                columns = columns_told(first, key)
                raise UserError(f"{path}: has no column {key!r}, the {name} key; its columns are {columns}")


def _without_null(name: str, value: Any) -> Any:
    """The value of a column that a passage is made from, None where it is what tables hold where there is
    nothing; also the title within the contents."""
    if not isinstance(value, str) or name not in _OF_A_PASSAGE:
        return value
    title, text = title_and_text(value) if name in CONTENTS else ("", value)
    return None if is_no_value(text) else text if is_no_value(title) else value


def title_and_text(contents: str) -> tuple[str, str]:
    """The title of a passage in Search-R1's form, `"TITLE"` in a line of its own above the text; otherwise
    none, and all of it."""
    found = _TITLE.match(contents)
    return (found[1].strip(), contents[found.end() :]) if found else ("", contents)


_TITLE = re.compile(r'\s*"([^\r\n]*)"[ \t]*\r?\n(?=\s*\S)')
_OF_A_PASSAGE = {*CONTENTS, *IDENTITY, "title"}
NO_KEYS = CorpusKeys()
"""Columns by the names of docs/data.md."""
