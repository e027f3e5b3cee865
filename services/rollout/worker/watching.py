"""A trajectory as it happens: what the model writes, what is searched for and found.

The agent loop knows nothing of it. It is given a sampler and a search that tell what passes through them, so
whoever watches sees the very loop of training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from retriever_service.client import Hit
    from services.rollout.engines.base import Engine, GenerateCall, Generation
    from services.rollout.worker.loop import Search
    from services.rollout.worker.templates import Template

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a character of which some bytes are still to come is decoded to."""


@dataclass(frozen=True)
class Writing:
    """The model goes on with an action."""

    text: str
    """Of the whole action so far."""


@dataclass(frozen=True)
class Observed:
    """The environment's text between two actions is known."""

    text: str


@dataclass(frozen=True)
class Searching:
    """A search begins."""

    query: str


@dataclass(frozen=True)
class Retrieved:
    """A search is over."""

    query: str
    hits: list[Hit]
    """Best first."""
    seconds: float


@dataclass(frozen=True)
class Restarted:
    """The trajectory begins anew: a log-prob was not finite."""


Event = Writing | Observed | Searching | Retrieved | Restarted
Watch = Callable[[Event], None]


class WatchedSampler:
    """The engine of one trajectory, which tells what is written. Where a call goes on from the end of the one
    before, both write the same action."""

    def __init__(self, engine: Engine, template: Template, watch: Watch) -> None:
        self._engine = engine
        self._template = template
        self._watch = watch
        self._prompt: int | None = None
        """Tokens of the prompt."""
        self._ids: list[int] = []
        """Prompt, actions and observations so far."""
        self._start = 0
        """Where the action in hand begins in them."""

    async def generate(self, call: GenerateCall) -> Generation:
        token_ids = call.token_ids
        if self._prompt is None:
            self._prompt = self._start = len(token_ids)
        elif len(token_ids) == self._prompt:
            # The bare prompt once more: the sample had log-probs that were not finite, and is made anew.
            self._start = self._prompt
            self._watch(Restarted())
        elif token_ids != self._ids:  # otherwise the action goes on
            self._start = len(token_ids)
            # Of an action that ended in mid-text its loop has dropped the rest.
            pairs = zip(self._ids, token_ids, strict=False)
            same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(self._ids))
            self._watch(Observed(self._template.decode(token_ids[same:])))
        before = token_ids[self._start :]

        def on_tokens(ids: list[int]) -> None:
            self._watch(Writing(self._template.decode(before + ids).rstrip(_UNFINISHED)))

        generation = await self._engine.generate(replace(call, on_tokens=on_tokens))
        self._ids = token_ids + generation.token_ids
        return generation


def token_texts(token_ids: list[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """The text of each token; joined they are the text of all. A character of several tokens is that of the
    last one."""
    texts: list[str] = []
    start = 0  # of the tokens that are decoded together with the next one, for the space between them
    known = 0  # tokens whose text is whole
    for i in range(len(token_ids)):
        before = decode(token_ids[start:known])
        now = decode(token_ids[start : i + 1])
        if now.endswith(_UNFINISHED) and i + 1 < len(token_ids):
            texts.append("")
            continue
        texts.append(now[len(before) :])
        start = known
        known = i + 1
    return texts


def watched_search(search: Search, watch: Watch) -> Search:
    """The search, which tells what is asked and found."""

    async def watched(query: str) -> list[Hit]:
        watch(Searching(query))
        began = time.monotonic()
        hits = await search(query)
        watch(Retrieved(query, hits, time.monotonic() - began))
        return hits

    return watched
