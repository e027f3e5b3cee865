"""What kind of value stands in a file or a request, in words."""

from __future__ import annotations

from typing import Any

_KINDS = {
    str: "text",
    int: "a number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    tuple: "a tuple",
    dict: "an object",
    type(None): "nothing",
}


def kind_of(value: Any) -> str:
    """`text`, `a number`, `a list`, ...: behind `got`, in a line for people who need not know Python's
    names."""
    return _KINDS.get(type(value), type(value).__name__)


def returned_kind(value: Any) -> str:
    """The same of what a function of a user's returned: JSON's `an object` is Python's `a dict`."""
    return "a dict" if type(value) is dict else kind_of(value)


def shown(value: Any) -> str:
    """A value behind `got`, as it was given."""
    return "nothing" if value is None else repr(value)
