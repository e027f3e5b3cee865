"""From one row of a corpus, as any of the field's corpora has it, to a passage: its id, contents and other
fields."""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import orjson

from retriever_service.index_folder.keys import NO_KEYS, OPTIONS, CorpusKeys
from services.common.errors import UserError
from services.common.printing.kinds import kind_of
from services.common.records import field_of
from services.common.records.columns import CONTENTS, IDENTITY, QUESTION, is_no_value, plain_name

EXPECTED = '{"id": "0", "contents": "\\"Title\\"\\ntext"}'
COLUMNS_EXPECTED = "a row with an id and a text, such as the columns id, title, text"
"""Of a table, Parquet or Arrow."""


NAMED_BY = f"a text may be called {', '.join(CONTENTS)}; columns of other names are given by {OPTIONS}"


class Row(NamedTuple):
    """One row of a corpus."""

    id: str
    contents: str
    fields: dict[str, Any]
    """The other columns that have a value."""
    placed: bool = False
    """Whether it had no id, and was named by its place."""


def row_of(
    row: Mapping[str, Any], place: str | None = None, named: Mapping[str, str] = MappingProxyType({})
) -> Row:
    """Id, contents and other fields of one row. Raises ValueError that says what is missing and which columns
    are there.

    A title that stands apart comes before the text: `"Title"`, a line break, the text. place: the id of a
    row that has none (`named_by_place`); None refuses such a row. named: what the user calls the columns that
    `CorpusKeys.applied` has put in place, for messages. Blanks around an id or such a title don't count.
    """
    identity = field_of(row, IDENTITY)
    name, given = identity if identity is not None else ("", None)
    placed = given is None or given != given  # NaN
    if placed:
        given = place
    elif isinstance(given, int) and not isinstance(given, bool):
        given = str(given)
    elif isinstance(given, float) and given.is_integer():  # so pandas writes a column with an empty cell
        given = str(int(given))
    if isinstance(given, str):  # ` 7` of a table written with blanks is `7`
        given = given.strip()
    if not isinstance(given, str) or not given:
        form = "a string that is not empty, or an integer"
        raise ValueError(_lacks(row, IDENTITY, "id", form, named))
    contents = field_of(row, CONTENTS)
    if contents is None and isinstance(row.get("contents"), str):
        contents = ("contents", row["contents"])
    if contents is None or not isinstance(contents[1], str):
        raise ValueError(_lacks(row, CONTENTS, "contents", "a string", named))
    rest = {key: value for key, value in row.items() if key != name and value is not None}
    if placed:
        rest = {key: value for key, value in rest.items() if plain_name(key) not in IDENTITY}
    text = contents[1]
    title = field_of(row, ["title"])
    if contents[0].lower() not in ("contents", "content"):
        if title is not None and isinstance(title[1], str):
            text = f'"{title[1].strip()}"\n{text}'
    else:
        rest.pop(contents[0], None)
    return Row(given, text, rest, placed)


def named_by_place(number: int, numbered: bool) -> str:
    """The id of a row without one. numbered: whether the corpus has no ids at all; otherwise its own ids are
    often numbers, too."""
    return str(number) if numbered else f"row_{number}"


def no_value_in(title: str, text: str, id: str = "") -> str | None:
    """Such as `the text is 'NULL'`; None where all say something."""
    for what, held in (("text", text), ("title", title), ("id", id)):
        if is_no_value(held):
            return f"the {what} is {held.strip()!r}"
    return None


def has_id(row: Mapping[str, Any]) -> bool:
    """Whether a row has a column for its id, with a value or without."""
    return not {plain_name(name) for name in row}.isdisjoint(IDENTITY)


def _lacks(
    row: Mapping[str, Any], names: Sequence[str], name: str, form: str, named: Mapping[str, str]
) -> str:
    """What is wrong with a row that has no value of this form in any of the columns `names`."""
    if found := field_of(row, names):
        return f"expected `{named.get(found[0], found[0])}`: {form}, got {kind_of(found[1])}"
    if asked := is_question(row):
        return f"`{asked}` makes it a question, and no passage; questions go to data.train or data.eval"
    if empty := next((own for own in row if plain_name(own) in names), None):
        return f"`{named.get(empty, empty)}` is empty"
    columns = f"; its columns are {', '.join(map(str, row))}" if row else ""
    # One of the others may be the text, by another name.
    if names is CONTENTS and any(plain_name(own) not in (*IDENTITY, "title", "url") for own in row):
        return f'no "{name}" ({form}){columns}; {NAMED_BY}'
    return f'no "{name}" ({form}){columns}'


def is_question(row: Mapping[str, Any]) -> str | None:
    """The column that makes a row without a passage one of a question file; None where there is none."""
    plain = {plain_name(name): str(name) for name in row}
    return (
        None
        if any(name in plain for name in CONTENTS)
        else next(filter(None, map(plain.get, QUESTION)), None)
    )


def parse_line(path: Path, number: int, line: bytes) -> Row:
    """The row of line `number` (from 1) of a plain file. Raises UserError with its place and the reason."""
    try:
        return parse_row(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line)
    except ValueError as error:
        raise UserError(f"corpus {path}, line {number}: {error}; expected {EXPECTED}") from None


def parse_row(raw: bytes, place: str | None = None, keys: CorpusKeys = NO_KEYS) -> Row:
    """The row of one JSON line. place: as for `row_of`. Raises ValueError saying what is wrong."""
    try:
        row = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        row = _with_constants(raw)
        if row is None:
            raise ValueError(f"not JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"{kind_of(row)} instead of an object")
    return row_of(keys.applied(row), place, keys.given)


def _with_constants(raw: bytes) -> Any:
    """A line with NaN or an infinity, which Python's json and pandas write and JSON lacks: None each. None
    for what is no JSON even so."""
    if b"NaN" not in raw and b"Infinity" not in raw:
        return None
    try:
        found = json.loads(raw, parse_constant=lambda name: None)
        return orjson.loads(json.dumps(found))  # which takes no lone surrogate
    except (ValueError, RecursionError):
        return None
