"""What a template is: the text that surrounds a policy. Prompt, tags, observations.

A template turns questions and search results into token ids, once; the loop appends those ids and never encodes again what the model wrote.
Your own: subclass `TagTemplate`, or write a class with the members of `Template`, and name it as `rollout.template: package.module:Name`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from services.contracts import ActionKind, Observation, Question

if TYPE_CHECKING:
    from retriever_service.client import Hit
    from services.settings import RolloutSettings

_ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CHARS_PER_TOKEN = 8
"""Characters that are encoded first for each token that is wanted. Text of many languages has fewer; where it has more, twice as much is next."""
SPARE_CHARS, SPARE_TOKENS = 256, 16
"""Encoded beyond what is wanted, so that a word in which the text is cut does not matter."""


@dataclass(frozen=True)
class ParsedAction:
    """What the model did: `content` is the query or the answer, stripped; empty where the action is invalid."""

    kind: ActionKind
    content: str


class Template(Protocol):
    """The text around a policy. All ids are of the policy's own tokenizer."""

    stop: tuple[str, ...]
    """Strings that end an action; they stay in the output."""
    min_observation_tokens: int
    """Tokens of an observation without documents: the smallest budget that `observation_ids` can keep to."""

    def prompt_ids(self, question: Question) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def parse(self, text: str) -> ParsedAction:
        """What one action's text does."""
        ...

    def observation_ids(self, hits: Sequence[Hit], budget: int) -> Observation:
        """Search results in at most `budget` tokens; documents are cut, the closing tag always stays."""
        ...

    def notice(self) -> Observation:
        """What follows an action that neither searches nor answers."""
        ...


class TagTemplate:
    """Tags `<search>` and `<answer>`, observations of the form `head documents tail`. Subclasses give the text."""

    stop: tuple[str, ...] = ("</search>", "</answer>")
    head: str
    """Text before the documents."""
    tail: str
    """Text after the documents."""
    invalid: str
    """The notice."""

    def __init__(self, tokenizer, settings: RolloutSettings):
        self.tokenizer = tokenizer
        self.settings = settings
        self._head, self._tail = self.encode(self.head), self.encode(self.tail)
        self._notice = Observation(self.encode(self.invalid), self.invalid)
        self.min_observation_tokens = len(self._head) + len(self._tail)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def parse(self, text: str) -> ParsedAction:
        """The first complete `<search>...</search>` or `<answer>...</answer>`; the dot matches newlines too."""
        match = _ACTION.search(text)
        return ParsedAction(match[1], match[2].strip()) if match else ParsedAction("invalid", "")

    def documents(self, hits: Sequence[Hit]) -> str:
        raise NotImplementedError

    def render(self, hits: Sequence[Hit]) -> str:
        """The whole observation as text, before anything is cut."""
        return f"{self.head}{self.documents(hits)}{self.tail}"

    def observation_ids(self, hits: Sequence[Hit], budget: int) -> Observation:
        text = self.render(hits)
        ids = self.first_ids(text, budget + 1)
        if len(ids) <= budget:
            return Observation(ids, text)
        room = budget - self.min_observation_tokens
        if room < 0:
            raise ValueError(
                f"an observation needs at least {self.min_observation_tokens} tokens; its budget is {budget}"
            )
        kept = self.first_ids(self.documents(hits), room)
        while kept and self.decode(kept).endswith(_REPLACEMENT):  # the cut fell inside a character
            kept.pop()
        ids = [*self._head, *kept, *self._tail]
        return Observation(ids, self.decode(ids))

    def first_ids(self, text: str, count: int) -> list[int]:
        """The first `count` ids of a text, or all where it has fewer. Encodes no more of a long text than that takes."""
        size = CHARS_PER_TOKEN * count + SPARE_CHARS
        while size < len(text):
            ids = self.encode(text[:size])
            if len(ids) >= count + SPARE_TOKENS:  # the last ones may be others where the text goes on
                return ids[:count]
            size *= 2
        return self.encode(text)[:count]

    def notice(self) -> Observation:
        return Observation(list(self._notice.token_ids), self._notice.text)
