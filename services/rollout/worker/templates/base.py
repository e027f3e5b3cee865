"""Templates: the text that surrounds a policy. Prompt, tags, observations.

A template turns questions and search results into token ids, once; the loop appends those ids and never
encodes again what the model wrote. Your own: subclass `TagTemplate`, or write a class with the members of
`Template`, and name it as `rollout.template: package.module:Name`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from services.common.printing.kinds import returned_kind
from services.contracts import ActionKind, Observation, Question, Reading
from services.rollout.worker.plain_text import Outside, TextEncoder, beginning
from services.rollout.worker.tags import first_action, outside_thoughts
from services.rollout.worker.tokenizer import decoder_of

if TYPE_CHECKING:
    from retriever_service.client import Hit
    from services.settings import RolloutSettings

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CHARS_PER_TOKEN = 8
"""Characters that are encoded first for each token that is wanted. Text of many languages has fewer; where it
has more, twice as much is next."""
SPARE_CHARS = 256
SPARE_TOKENS = 16
"""Encoded beyond what is wanted, so that a word in which the text is cut does not matter."""
KNOWN_OBSERVATIONS = 128
KNOWN_CHARS = 20_000
"""Observations that are kept, and the longest text of one."""


@dataclass(frozen=True)
class ParsedAction:
    """An action of the model: `content` is the query or the answer, stripped; empty where the action is
    invalid. tool: the name of the tool that an action of kind `tool` calls."""

    kind: ActionKind
    content: str
    tool: str | None = None


class Template(Protocol):
    """The text around a policy. All ids are of the policy's own tokenizer.

    A template may also have `reading`, `ends` and `result_ids`, as `TagTemplate` has. Without `reading`
    rewards read the tags as `innermost`; without `ends` each stop string ends an action; `result_ids` is
    needed where `rollout.tools` names a tool. One whose observations end the model's turn may have
    `following`, one whose actions are not `<search>` and `<answer>` tags `written`, and one that shows less
    of an earlier turn than was written `drops_thoughts` and `shown_later`, as `ToolCallTemplate` has. Nothing
    else of a template is used.
    """

    stop: tuple[str, ...]
    """Strings that end an action; they stay in the output."""
    min_observation_tokens: int
    """Tokens of an observation without documents: the smallest budget that `observation_ids` can keep to."""

    def prompt_ids(self, question: Question) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def parse(self, text: str) -> ParsedAction:
        """Read one action's text."""
        ...

    def observation_ids(self, hits: Sequence[Hit], budget: int) -> Observation:
        """Search results in at most `budget` tokens; documents are cut, the closing tag always stays."""
        ...

    def notice(self) -> Observation:
        """The observation after an action that neither searches nor answers."""
        ...


def reading_of(template: Template) -> Reading:
    """The reading of a template's tags, for rewards that read them again."""
    reading: Reading = getattr(template, "reading", "innermost")
    return reading


class TagTemplate:
    """Tags `<search>` and `<answer>`, observations of the form `head documents tail`. Subclasses give the
    text.

    Questions and documents are text from outside: encode them as `Outside`. What `documents` returns is, and
    its hits come with the template's own tags made harmless, so no document closes the block that it stands
    in.
    """

    stop: tuple[str, ...] = ("</search>", "</answer>")
    tags: tuple[str, ...] = ("think", "search", "information", "answer")
    """Names of the tags that a document must not use."""
    head: str
    """Text before the documents."""
    tail: str
    """Text after the documents."""
    invalid: str
    """The notice."""

    def __init__(self, tokenizer: Any, settings: RolloutSettings):
        for name in ("head", "tail", "invalid"):
            if not isinstance(found := getattr(self, name, None), str):
                raise TypeError(f"its `{name}` is {returned_kind(found)}; expected a text")
        self.tokenizer = tokenizer
        self.settings = settings
        self.reading = settings.reading
        self.tools = tuple(settings.tools)
        self.stop = (*self.stop, *(f"</{name}>" for name in self.tools))
        self.tags = (*self.tags, *self.tools)
        self._encoder = TextEncoder(tokenizer)
        self._decode = decoder_of(tokenizer)
        self._made: dict[tuple[str, int], Observation] = {}
        self._tag = re.compile(f"<(?=/?(?:{'|'.join(self.tags)})>)", re.IGNORECASE)
        self._head = self.encode(self.head)
        self._tail = self.encode(self.tail)
        self._notice = Observation(self.encode(self.invalid), self.invalid)
        self.min_observation_tokens = len(self._head) + len(self._tail)

    def encode(self, *pieces: str) -> list[int]:
        """Ids of the pieces joined; those of type `Outside` yield no control token."""
        return self._encoder.encode(*pieces)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._decode(list(token_ids))

    def parse(self, text: str) -> ParsedAction:
        """The pair of tags that decides; see services.rollout.worker.tags."""
        pair = first_action(text, self.reading, self.tools)
        if pair is None:
            return ParsedAction("invalid", "")
        content = pair.content.strip()
        if pair.kind == "search":
            return ParsedAction("search", content)
        return (
            ParsedAction("answer", content)
            if pair.kind == "answer"
            else ParsedAction("tool", content, pair.kind)
        )

    def ends(self, text: str) -> bool:
        """True where a stop string in the text ends the action. One in a think block does not, unless tags
        are read as Search-R1 does."""
        if self.reading == "innermost":
            shown, opened = outside_thoughts(text)
            text = shown[:opened]
        return any(stop in text for stop in self.stop)

    def harmless(self, contents: str) -> str:
        """A document whose tags are no tags: a space comes after the `<`. The tokenizer's own normalisation
        makes none either, of full-width letters, say."""
        contents = self._tag.sub("< ", contents)
        if self._tag.search(self._encoder.normalized(contents)):
            opening = (c for c in set(contents) if "<" in self._encoder.normalized(c))
            contents = contents.translate({ord(c): f"{c} " for c in opening})
        return contents

    if TYPE_CHECKING:
        # Declared, not defined: `make_template` refuses a subclass that lacks one before the first prompt.
        def prompt_ids(self, question: Question) -> list[int]:
            """The question's prompt."""

        def documents(self, hits: Sequence[Hit]) -> str:
            """The text between `head` and `tail`; the hits' own tags are harmless already."""

    def observation_ids(self, hits: Sequence[Hit], budget: int) -> Observation:
        text: object = self.documents([replace(hit, contents=self.harmless(hit.contents)) for hit in hits])
        if not isinstance(text, str):
            raise TypeError(f"`documents` returned {returned_kind(text)}; expected a text")
        return self._enclosed(text, budget)

    def result_ids(self, text: str, budget: int) -> Observation:
        """What a tool returned, between `head` and `tail` in at most `budget` tokens; its own tags are made
        harmless."""
        return self._enclosed(self.harmless(text), budget)

    def _enclosed(self, text: str, budget: int) -> Observation:
        """Trajectories of one group often search for the same: the last observations are kept."""
        made = self._made.get((text, budget))
        if made is None:
            made = self._encoded(text, budget)
            if len(text) <= KNOWN_CHARS:
                if len(self._made) >= KNOWN_OBSERVATIONS:
                    del self._made[next(iter(self._made))]
                self._made[text, budget] = made
        return Observation(list(made.token_ids), made.text)

    def _encoded(self, text: str, budget: int) -> Observation:
        documents = Outside(text)
        ids = self.first_ids(budget + 1, self.head, documents, self.tail)
        if len(ids) <= budget:
            return Observation(ids, f"{self.head}{documents}{self.tail}")
        room = budget - self.min_observation_tokens
        if room < 0:
            raise ValueError(
                f"an observation needs at least {self.min_observation_tokens} tokens; its budget is {budget}"
            )
        kept = self.first_ids(room, documents)
        while kept and self.decode(kept).endswith(_REPLACEMENT):  # the cut fell inside a character
            kept.pop()
        ids = [*self._head, *kept, *self._tail]
        return Observation(ids, self.decode(ids))

    def first_ids(self, count: int, *pieces: str) -> list[int]:
        """The first `count` ids of the pieces joined, or all where they have fewer. Encodes no more of a long
        text than that takes."""
        size = CHARS_PER_TOKEN * count + SPARE_CHARS
        while size < sum(map(len, pieces)):
            ids = self.encode(*beginning(pieces, size))
            if len(ids) >= count + SPARE_TOKENS:  # the last ones may be others where the text goes on
                return ids[:count]
            size *= 2
        return self.encode(*pieces)[:count]

    def notice(self) -> Observation:
        return Observation(list(self._notice.token_ids), self._notice.text)
