"""Names of columns, as different data sets spell them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from services.common.names import near_name

QUESTION = ("question", "query", "problem", "question_text")
"""Columns that hold a question's text, the first that is there counts."""
IDENTITY = ("id", "_id", "docid", "doc_id", "pid", "passage_id", "idx", "uid", "qid", "question_id")
"""Columns that hold an id."""
CONTENTS = ("contents", "content", "text", "passage", "passage_text", "body", "document")
"""Columns that hold a passage's text."""
NO_VALUE = {"null", "nan", "none", "n/a", "#n/a", "<na>", "-", "--"}
"""What tables hold where there is nothing, in small letters. Each may be meant: an answer may be None."""
SUCH_AS = "NULL, nan, None, N/A or -"
"""Some of these, for messages."""
NULL_IS_EMPTY = "--null-is-empty (of a run: {}.null_is_empty) takes such cells for empty"
"""For messages, with the section of a run's configuration."""
_APART = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[\s.-]+")


@lru_cache(1024)
def plain_name(name: str) -> str:
    """A column's name in one spelling: `Golden Answers`, `goldenAnswers` and `golden-answers` are
    `golden_answers`."""
    return _APART.sub("_", str(name).strip()).lower()


def field_of(row: Mapping[str, Any], names: Iterable[str]) -> tuple[str, Any] | None:
    """The row's own name and value of the first of `names` (plain ones) that it has with a value; None where
    it has none."""
    spelt: dict[str, str] = {}
    for name in row:
        spelt.setdefault(plain_name(name), name)
    for name in names:
        own = spelt.get(name)
        if own is not None and not is_missing(row[own]):
            return own, row[own]
    return None


def column_of(row: Mapping[str, Any], key: str) -> str | None:
    """The row's own name of the column that a user's key names or is in (`meta.title`); None where it has
    none. A name as it stands in the row counts before one in another spelling."""
    for name in (key, key.partition(".")[0]):
        if name in row:
            return name
        plain = plain_name(name)
        if (own := next((own for own in row if plain_name(own) == plain), None)) is not None:
            return own
    return None


def columns_told(row: Mapping[str, Any], key: str) -> str:
    """The columns of a row, for a message that a key names none of them, and the column, or key in one, that
    may be meant."""
    inner = [f"{own}.{name}" for own, held in row.items() if isinstance(held, dict) for name in held]
    return _told((*map(str, row),), (*inner,), key)


@lru_cache(256)
def _told(columns: tuple[str, ...], inner: tuple[str, ...], key: str) -> str:
    return (", ".join(columns) or "none") + near_name(key, inner if "." in key and inner else columns)


def value_at(row: Mapping[str, Any], key: str) -> Any:
    """What stands there; None where nothing does."""
    own = column_of(row, key)
    value: Any = None if own is None else row[own]
    if own is not None and plain_name(own) != plain_name(key):
        for part in key.split(".")[1:]:
            value = value.get(part) if isinstance(value, Mapping) else None
    return value


def is_missing(value: Any) -> bool:
    """None, a text of which nothing is seen, an empty list or dict: what a data set has where it has
    nothing."""
    if value is None:
        return True
    if isinstance(value, str):
        text = value.strip()
        return not text or (not text[0].isprintable() and not any(map(str.isprintable, text)))
    return isinstance(value, list | tuple | dict) and not value


def is_no_value(text: str) -> bool:
    """Whether a text is what tables hold where there is nothing, such as NULL."""
    return len(text) < 20 and text.strip().lower() in NO_VALUE


def without_null(value: Any) -> Any:
    """A cell, empty where it is what tables hold where there is nothing; in a list such ones are left out."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, str):
        return "" if is_no_value(value) else value
    if isinstance(value, list | tuple):
        return [held for one in value if not is_missing(held := without_null(one))]
    if isinstance(value, dict):
        return {name: without_null(held) for name, held in value.items()}
    return value
