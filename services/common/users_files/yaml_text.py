"""YAML, and what is wrong with a text in plain words, with its lines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ruamel.yaml.error import MarkedYAMLError

_WORDS = (
    (
        r"expected <block end>, but found '(<block mapping start>|-)'",
        "the indentation fits no line above; keys of one section begin in the same column",
    ),
    (
        r"expected <block end>, but found .*",
        "more text behind the end of a value; put quotes around the whole of it",
    ),
    (r"could not find expected ':'", "line {} has no `: `"),
    (r"found unexpected end of stream", "the quote that begins in line {} is not closed"),
    (r"found character '\\t' that cannot start any token", "a tab; indent by spaces"),
    (r"found character (.*) that cannot start any token", r"a text that begins with \1 needs quotes"),
    (
        r"(expected ',' or '.'), but got '<stream end>'",
        r"\1 for the bracket of line {}, got the end of the file",
    ),
    (r"(expected ',' or '.'), but got (.*)", r"\1 for the bracket of line {}, got \2"),
    (r"but found another document", "`---` begins a second document; expected one"),
)
"""By the parser's problem; {} is the line of its context."""


def parse_yaml(text: str) -> Any:
    """A YAML 1.2 text: `off` is a word, 1e-4 a number. Raises ValueError, which begins with `line N, column
    M: ` where the place is known."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        return YAML(typ="safe", pure=True).load(text)
    except MarkedYAMLError as error:
        raise ValueError(_in_words(error, text)) from error
    except (YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from error


def line_of(text: str, key: Sequence[Any]) -> int | None:
    """The line, from 1, of a nested key of a text that `parse_yaml` takes. key: its names, and places in a
    list from 0. None where it does not stand there itself."""
    from ruamel.yaml.nodes import MappingNode, SequenceNode

    node = _composed(text)
    line = None
    for part in key:
        if isinstance(node, MappingNode):
            # A key may be a number or a date; it is compared as it is written.
            pair = next(((name, value) for name, value in node.value if name.value == str(part)), None)
        elif isinstance(node, SequenceNode) and isinstance(part, int) and part < len(node.value):
            pair = (node.value[part], node.value[part])
        else:
            pair = None
        if pair is None:
            return None
        line, node = pair[0].start_mark.line + 1, pair[1]
    return line


@lru_cache(maxsize=1)
def _composed(text: str) -> Any:
    """The nodes of a text, which take most of a second for some hundred lines: several keys of one are asked
    for. None where it is no YAML."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        return YAML(typ="safe", pure=True).compose(text)
    except (YAMLError, RecursionError):
        return None


def _in_words(error: MarkedYAMLError, text: str) -> str:
    """`line 3, column 2: a tab; indent by spaces`, of an error of ruamel in a text."""
    mark = error.problem_mark or error.context_mark
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    context = error.context_mark.line + 1 if error.context_mark else "above"
    problem = " ".join((error.problem or error.context or "").replace("\t", "\\t").split())
    if twice := re.match(r'found duplicate key "(.*?)" with value', problem):
        first = _line_of_key(text, twice[1], error.context_mark)
        return f"{place}the key {twice[1]} stands twice" + (f", first in line {first}" if first else "")
    for pattern, words in _WORDS:
        if found := re.fullmatch(pattern, problem):
            return place + found.expand(words).replace("{}", str(context))
    if problem == "mapping values are not allowed here" and mark is not None:
        return place + _colon(text.split("\n")[: mark.line + 1], mark.column)
    return place + problem


def _colon(lines: list[str], column: int) -> str:
    """Why the last line may have no `: ` at this column, from 0."""
    if ": " in lines[-1][:column]:
        return "a second `: ` in the line; a text with one needs quotes"
    number = next((n for n in range(len(lines) - 1, 0, -1) if lines[n - 1].strip()), 0)
    if number and ":" in lines[number - 1]:
        return f"the line is indented deeper than line {number}, which has a value already"
    return f"line {number} above has no `: `"


def _line_of_key(text: str, key: str, start: Any) -> int | None:
    """The first line, from 1, of a key of the mapping that begins at the mark `start`."""
    from ruamel.yaml import YAML
    from ruamel.yaml.nodes import MappingNode, SequenceNode

    waiting: list[Any] = [YAML(typ="safe", pure=True).compose(text)]
    seen: set[int] = set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:  # an alias; a node may hold itself
            continue
        seen.add(id(node))
        if isinstance(node, SequenceNode):
            waiting += node.value
        if not isinstance(node, MappingNode):
            continue
        if start is not None and node.start_mark.index == start.index:
            lines = [name.start_mark.line + 1 for name, _ in node.value if name.value == key]
            return min(lines, default=None)
        waiting += [value for _, value in node.value]
    return None
