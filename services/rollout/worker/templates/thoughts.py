"""The thoughts of earlier turns, as a model family's chat template has them.

Most families keep them: Qwen2.5 and Llama 3, to which a thought is text like any other, and Qwen3 until the
user's next question, which never comes here. QwQ's drops them: a turn is shown without the thoughts of the
turns before it, and the tokens of one turn are no prefix of those of the next. Such a trajectory can be
sampled as the family does, but it is no one sequence to train on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from services.common.errors import UserError
from services.rollout.worker.templates.search_r1 import rendered

CLOSED = "</think>"
ASKED = "UNSPIRALQUESTION"
THOUGHTS = ("UNSPIRALTHOUGHTONE", "UNSPIRALTHOUGHTTWO")
WRITTEN = ("UNSPIRALWRITTENONE", "UNSPIRALWRITTENTWO")
RESULTS = ("UNSPIRALRESULTONE", "UNSPIRALRESULTTWO")
Decode = Callable[[Sequence[int]], str]
Tools = list[dict[str, Any]]


@dataclass(frozen=True)
class Dropping:
    """How a chat template drops thoughts: all that the model wrote up to its last `</think>`."""

    opener: str
    """Text with which it begins a turn of the model, and which an earlier turn lacks: `<think>` and a line
    break, or nothing."""
    breaks: bool
    """Whether the line breaks after `</think>` go too."""

    def left(self, token_ids: Sequence[int], decode: Decode, encode: Callable[[str], list[int]]) -> list[int]:
        """An action's tokens as later turns are shown them: those after the thought as they were sampled.
        encode: for the rest of a token in which the thought ends."""
        text = decode(token_ids)
        end = text.rfind(CLOSED)
        if end < 0:
            return list(token_ids)
        end += len(CLOSED)
        if self.breaks:
            end = len(text) - len(text[end:].lstrip("\n"))
        first = bisect_left(range(len(token_ids)), end, key=lambda n: len(decode(token_ids[:n])))
        rest = decode(token_ids[:first])[end:]
        return [*(encode(rest) if rest else []), *token_ids[first:]]


def dropping(tokenizer: Any, tools: Tools, tool: str) -> Dropping | None:
    """How the chat template drops the thoughts of earlier turns; None where it keeps them.

    tool: the name of the one that gives the results. Raises UserError, whose text is to follow the name of a
    key, for a chat template that drops them in another way than is known here.
    """
    asked = {"role": "user", "content": ASKED}
    turns = [turn for n in range(2) for turn in _turn(_thinking(n), n, tool)]
    shown = rendered(tokenizer, [asked, *turns], tools)
    kept = [thought in shown for thought in THOUGHTS]
    if all(kept) or not all(text in shown for text in WRITTEN):
        return None
    begun = rendered(tokenizer, [asked], tools)
    bare = rendered(tokenizer, [asked, *_turn(WRITTEN[0], 0, tool), *_turn(WRITTEN[1], 1, tool)], tools)
    before = bare.partition(WRITTEN[0])[0]
    for breaks in ("", "\n\n"):
        as_known = bare.replace(WRITTEN[0], breaks + WRITTEN[0]).replace(WRITTEN[1], breaks + WRITTEN[1])
        if shown == as_known and begun.startswith(before):
            return Dropping(begun.removeprefix(before), breaks=not breaks)
    raise UserError("the model's chat template drops some thoughts of earlier turns and leaves others")


def _thinking(n: int) -> str:
    return f"<think>\n{THOUGHTS[n]}\n</think>\n\n{WRITTEN[n]}"


def _turn(written: str, n: int, tool: str) -> list[dict[str, str]]:
    """A turn of the model, and the result that it got."""
    return [
        {"role": "assistant", "content": written},
        {"role": "tool", "name": tool, "content": RESULTS[n]},
    ]
