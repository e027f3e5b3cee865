"""The columns of a row that its question is not read from (`extra_info`, `metadata`, `supporting_facts`), for
code of the user's own."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import date, time
from decimal import Decimal
from typing import Any

from services.common.records.columns import column_of, plain_name, value_at
from services.contracts import kept
from trainer.data.columns import Keys, is_wanted

KEPT_CHARS = 2_000
"""Most characters of a column, as JSON, that is kept unasked."""
ROW_CHARS = 20_000
"""Most of all such columns of a row together."""
NAMED_CHARS = 100_000
"""Most of a column that `data.keep_columns` names."""
_UNSEEN = "it holds what JSON cannot say"


def other_columns(row: Mapping[str, Any], keys: Keys, names: Iterable[str] | None = None) -> str:
    """Those that go along with the question, and why others do not, as `services.contracts.kept` writes them.
    names: all columns of the file, where only some were read."""
    columns: dict[str, str] = {}
    left_out: dict[str, str] = {}
    if keys.keep is not None:
        for key in keys.keep:
            if column_of(row, key) is not None:
                _keep(key, value_at(row, key), NAMED_CHARS, columns, left_out)
        return kept(columns, left_out)
    room = ROW_CHARS
    for name, value in row.items():
        if _is_other(name, keys):
            room -= _keep(name, value, min(KEPT_CHARS, room), columns, left_out)
    for name in names or ():
        if name not in row and _is_other(name, keys):
            left_out[name] = _too_long(name, KEPT_CHARS)
    return kept(columns, left_out)


def _is_other(name: Any, keys: Keys) -> bool:
    """Whether a question is read from other columns than this one. What `extra_info` holds is read where
    nothing else is there, and kept in any case: rewards of verl's form take it."""
    if not isinstance(name, str):
        return False
    plain = plain_name(name)
    return plain == "extra_info" or not (
        is_wanted(name) or any(plain == plain_name(key) for key in keys.given.values())
    )


def _keep(key: str, value: Any, most: int, columns: dict[str, str], left_out: dict[str, str]) -> int:
    """How many characters the kept column takes."""
    try:
        if _beyond(value, most) < 0:
            raise OverflowError
        text = _JSON.encode(value)
        if len(text) > most:
            raise OverflowError
    except OverflowError:
        left_out[key] = _too_long(key, most)
        return 0
    except (TypeError, ValueError, RecursionError):
        left_out[key] = _UNSEEN
        return 0
    columns[key] = text
    return len(text)


def _too_long(key: str, most: int) -> str:
    """What to do about it, where something can be done."""
    if most == NAMED_CHARS:
        return f"it has more than {NAMED_CHARS:,} characters; data.keep_columns may name a key in it"
    of = f"more than {KEPT_CHARS:,} characters" if most == KEPT_CHARS else "no room beside the row's others"
    return f"it has {of}; data.keep_columns names those to keep, such as [{key}]"


def _beyond(value: Any, room: int) -> int:
    """What is left of the room; negative where the texts in it have more. Long ones are not written to be
    measured."""
    if isinstance(value, str):
        return room - len(value)
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return room - 1
    for one in value:
        if (room := _beyond(one, room)) < 0:
            break
    return room


def _plain(value: Any) -> Any:
    """What tables have and JSON has not."""
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, set | frozenset):
        return sorted(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is none of JSON's kinds")


_JSON = json.JSONEncoder(ensure_ascii=False, default=_plain)
