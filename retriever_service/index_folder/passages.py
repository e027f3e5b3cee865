"""From one row of a corpus, as any of the field's corpora has it, to a passage: its id, contents and other
fields."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from services.common.errors import UserError
from services.common.records import field_of
from services.common.records.columns import CONTENTS, IDENTITY, plain_name

EXPECTED = '{"id": "0", "contents": "\\"Title\\"\\ntext"}'


class Row(NamedTuple):
    """One row of a corpus."""

    id: str
    contents: str
    fields: dict[str, Any]
    """The other columns that have a value."""


def row_of(row: Mapping[str, Any], number: int | None = None) -> Row:
    """Id, contents and other fields of one row. Raises ValueError that says what is missing and which columns
    are there.

    A title that stands apart comes before the text: `"Title"`, a line break, the text. number: the id of a
    row that has no column for one; None refuses such a row.
    """
    identity = field_of(row, IDENTITY)
    name, given = identity if identity is not None else ("", None)
    if number is not None and not has_id(row):
        given = number
    if isinstance(given, int) and not isinstance(given, bool):
        given = str(given)
    if not isinstance(given, str) or not given:
        raise ValueError(f'no "id" (a string that is not empty, or an integer){_columns(row)}')
    contents = field_of(row, CONTENTS)
    if contents is None and isinstance(row.get("contents"), str):
        contents = ("contents", row["contents"])
    if contents is None or not isinstance(contents[1], str):
        raise ValueError(f'no "contents" (a string){_columns(row)}')
    rest = {key: value for key, value in row.items() if key != name and value is not None}
    text = contents[1]
    title = field_of(row, ["title"])
    if contents[0].lower() not in ("contents", "content"):
        if title is not None and isinstance(title[1], str):
            text = f'"{title[1]}"\n{text}'
    else:
        rest.pop(contents[0], None)
    return Row(given, text, rest)


def has_id(row: Mapping[str, Any]) -> bool:
    """Whether a row has a column for its id, with a value or without."""
    return not {plain_name(name) for name in row}.isdisjoint(IDENTITY)


def _columns(row: Mapping[str, Any]) -> str:
    return f"; its columns are {', '.join(map(str, row))}" if row else ""


def parse_line(path: Path, number: int, line: bytes) -> Row:
    """The row of line `number` (from 1) of a plain file. Raises UserError with its place and the reason."""
    try:
        return parse_row(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line)
    except ValueError as error:
        raise UserError(f"corpus {path}:{number}: {error}; expected {EXPECTED}") from None


def parse_row(raw: bytes, number: int | None = None) -> Row:
    """The row of one JSON line. number: as for `row_of`. Raises ValueError saying what is wrong."""
    try:
        row = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"{type(row).__name__} instead of an object")
    return row_of(row, number)
