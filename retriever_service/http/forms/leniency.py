"""What a request may have wrong and is answered all the same, as the servers that this one replaces answer
it.

Numbers and flags written as text are read, characters that are no text are replaced, long queries are cut, a
limit that is too
high is lowered. Each such change is noted, and the header `X-Unspiral-Changed` of the answer names them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, StrictBool, StrictInt, WithJsonSchema
from pydantic_core import PydanticCustomError

CHANGED_HEADER = b"x-unspiral-changed"
PARTIAL_HEADER = b"x-unspiral-partial"
LIMIT_NAMES = frozenset({
    "k", "n", "limit", "num", "size", "count", "top", "topn", "top_results", "num_results", "n_results",
    "max_results", "num_docs", "n_docs", "max_docs", "num_documents", "max_documents", "num_passages",
    "retrieval_topk", "search_topk", "max_num_results", "rows", "per_page", "page_size",
})  # fmt: skip
"""Names that other search services give the number of documents: refused by name, where they would be
overlooked."""
_NAMED = 5
"""Most changes that the header names."""
_UNFIT = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
"""Control characters: no text has them, and NUL breaks tokenizers in C."""
_FLAGS = {"true": True, "yes": True, "on": True, "t": True, "y": True, "1": True} | {
    "false": False, "no": False, "off": False, "f": False, "n": False, "0": False
}  # fmt: skip


def _count(value: Any) -> Any:
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,18}", value):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _flag(value: Any) -> Any:
    if isinstance(value, str):
        found = _FLAGS.get(value.lower())
        if found is None:
            raise PydanticCustomError("bool_type", "Input should be true or false")
        return found
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else value


def _any_case(word: str) -> str:
    return "".join(f"[{c.upper()}{c}]" if c.isalpha() else c for c in word)


Count = Annotated[
    StrictInt,
    Field(ge=0),
    BeforeValidator(_count),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": "^[0-9]{1,18}$"}]}
    ),
]
"""A number of documents, also as text or as a whole float."""
Flag = Annotated[
    StrictBool,
    BeforeValidator(_flag),
    WithJsonSchema({"anyOf": [
        {"type": "boolean"},
        {"type": "integer", "minimum": 0, "maximum": 1},
        {"type": "string", "pattern": f"^({'|'.join(map(_any_case, _FLAGS))})$"},
    ]}),
]  # fmt: skip
"""True or false, also as text or as 0 and 1."""


def cleaned(
    texts: list[str], field: str, max_chars: int, changed: list[str], alone: bool = False
) -> list[str]:
    """The texts without what is no text, and no longer than `max_chars`. `alone`: `field` is one text and no
    list."""
    kept = texts
    for i, text in enumerate(texts):
        if len(text) <= max_chars and (text.isprintable() or not _UNFIT.search(text)):
            continue
        name = field if alone else f"{field}[{i}]"
        kept = list(texts) if kept is texts else kept
        if len(text) > max_chars:
            changed.append(f"{name}: cut from {len(text)} to {max_chars} characters")
            text = text[:max_chars]
        if _UNFIT.search(text):
            changed.append(f"{name}: control characters replaced")
        kept[i] = _UNFIT.sub(" ", text)
    return kept


def clamped(asked: int, maximum: int, field: str, changed: list[str]) -> int:
    """The number asked for, or the limit."""
    if asked > maximum:
        changed.append(
            f"{field}: lowered from {asked} to {maximum}"
            if asked < 10**9
            else f"{field}: lowered to {maximum}"
        )
    return min(asked, maximum)


def header_of(changed: list[str]) -> tuple[bytes, bytes]:
    """The header that names what was changed, ASCII alone: `queries[3]: cut from 9000 to 8192 characters;
    topk: lowered ...`."""
    named = changed[:_NAMED]
    more = [f"{len(changed) - _NAMED} more"] if len(changed) > _NAMED else []
    return CHANGED_HEADER, "; ".join([*named, *more]).encode("ascii", "replace")


def refused_limit(given: Mapping[str, Any] | None) -> str | None:
    """The name among unknown fields that another service has for the number of documents."""
    return next((name for name in given or () if name.lower().replace("-", "_") in LIMIT_NAMES), None)
