"""Reading the tags in a model's text. Loop, rewards and the answer mask all use this module, so they agree.

The field's models think in `<think>...</think>`, and mention tags there that they do not mean: "I can use
`<search>` to find it". Two readings (`rollout.reading`):

- `innermost`: a pair runs from the last opening tag to the first closing one. What stands in a closed think
  block does nothing, and is no part of the query or the answer that it stands in. In a think block that is
  still open, a pair counts only where the text ends with it: a model that means it stops there, one that
  mentions it goes on.
- `search_r1`: what Search-R1's own loop reads (arXiv 2503.09516, its released code): a pair runs from the
  first opening tag, and think blocks are text like any other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import NamedTuple

from services.contracts import Reading

NAMES = ("search", "answer")
"""Names of the pairs that every template has."""
_THINK = re.compile(r"<(/?)think>")
_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
_ANSWER = re.compile(r"<(answer)>(.*?)</answer>", re.DOTALL)


class Pair(NamedTuple):
    """A complete pair of tags: characters `[start, end)` of the text, tags included, and what stands between
    them; read `innermost`, with a space in place of each think block."""

    kind: str
    """`search`, `answer`, or the name of a tool."""
    start: int
    end: int
    content: str


def first_action(text: str, reading: Reading = "innermost", tools: tuple[str, ...] = ()) -> Pair | None:
    """The pair that decides what an action does. tools: names of the tools, whose pairs count too."""
    if reading == "search_r1":
        match = _patterns(tools).first_pair.search(text)
        return _pair(match) if match else None
    return next(_meant(text, False, tools), None)


def last_answer(text: str, reading: Reading = "innermost", thinking: bool = False) -> Pair | None:
    """The last complete answer. `thinking`: the text begins inside a think block."""
    if reading == "search_r1":
        answers: Iterable[Pair] = map(_pair, _ANSWER.finditer(text))
    else:
        answers = (pair for pair in _meant(text, thinking) if pair.kind == "answer")
    return max(answers, key=lambda pair: pair.start, default=None)


def outside_thoughts(text: str, thinking: bool = False) -> tuple[str, int | None]:
    """The text with spaces in place of its closed think blocks; and the start of the block that is still
    open, or None.

    A `</think>` without a block before it ends one that the text began in.
    """
    kept: list[str] = []
    done = 0  # characters of the text that `kept` stands for
    opened = 0 if thinking else None
    first = True
    for tag in _THINK.finditer(text):
        if not tag[1] and opened is None:
            opened = tag.start()
        elif tag[1] and (opened is not None or first):
            start = opened or 0
            # As many spaces as characters: positions in what is shown are positions in the text.
            kept += [text[done:start], " " * (tag.end() - start)]
            done = tag.end()
            opened = None
        first = False
    return "".join([*kept, text[done:]]), opened


class _Patterns(NamedTuple):
    tag: re.Pattern[str]
    first_pair: re.Pattern[str]


@cache
def _patterns(tools: tuple[str, ...]) -> _Patterns:
    names = "|".join(map(re.escape, (*NAMES, *tools)))
    return _Patterns(
        re.compile(f"<(/?)({names})>"),
        re.compile(rf"<({names})>(.*?)</\1>", re.DOTALL),
    )


def _meant(text: str, thinking: bool, tools: tuple[str, ...] = ()) -> Iterator[Pair]:
    """The pairs of the innermost reading, in order."""
    shown, opened = outside_thoughts(text, thinking)
    tag = _patterns(tools).tag
    if opened is None:
        yield from _pairs(tag, text, shown, 0, len(shown))
        return
    yield from _pairs(tag, text, shown, 0, opened)
    end = len(shown.rstrip())
    yield from (pair for pair in _pairs(tag, text, shown, opened, end) if pair.end == end)


def _pairs(names: re.Pattern[str], text: str, shown: str, start: int, end: int) -> Iterator[Pair]:
    """From the last opening tag to the first closing one of its kind. shown: the text without its
    thoughts."""
    opened: dict[str, re.Match[str]] = {}
    for tag in names.finditer(shown, start, end):
        if not tag[1]:
            opened[tag[2]] = tag
        elif tag[2] in opened:
            first = opened[tag[2]]
            content = _THOUGHT.sub(" ", text[first.end() : tag.start()])
            yield Pair(tag[2], first.start(), tag.end(), content)
            opened.clear()


def _pair(match: re.Match[str]) -> Pair:
    return Pair(match[1], match.start(), match.end(), match[2])
