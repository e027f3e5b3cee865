"""What a key accepts, in a user's words instead of pydantic's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.common.printing.messages import said

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "dict": "keys with values, such as {KEY: VALUE}",
    "list": "a list, such as [A, B]",
}
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("above", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("below", "lt"),
}
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
_PATTERNS = {_NAME: "expected letters, digits, dot, dash and underscore, a letter or digit first"}
_PYDANTIC = "Input should be "


def expected(error: Mapping[str, Any]) -> str:
    """An error of pydantic as `expected a whole number`; the message of a validator of ours as it is."""
    kind, context = error["type"], error.get("ctx", {})
    if kind in _BOUNDS:
        word, key = _BOUNDS[kind]
        return f"expected {word} {context[key]:g}"
    if (name := kind.partition("_")[0]) in _KINDS and kind.endswith(("_type", "_parsing", "_from_float")):
        return f"expected {_KINDS[name]}"
    if kind == "string_pattern_mismatch":
        return _PATTERNS.get(context["pattern"], f"expected text of the pattern {context['pattern']}")
    if kind == "string_too_long":
        return f"expected at most {context['max_length']} characters"
    message: str = said(error["msg"])
    if message.startswith(_PYDANTIC):
        return f"expected {message.removeprefix(_PYDANTIC)}"
    return message
