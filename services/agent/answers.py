"""A trajectory as a chat completion of OpenAI's form: whole, or in chunks while it is written.

The message's `content` is the answer alone. What the model wrote before it is `reasoning_content`, as
reasoning models' servers have it, and each search is a tool call in the field `searches`, with its documents:
not in `tool_calls`, which would ask the client to carry it out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from services.contracts import Action, Trajectory
from services.rollout.worker.tags import Pair, last_answer
from services.rollout.worker.watching import Event, Observed, Restarted, Retrieved, Searching, Writing

ANSWER = "<answer>"


def answer_pair(trajectory: Trajectory) -> Pair | None:
    """The answer in the last action's text; None where the trajectory has none."""
    last = trajectory.actions[-1]
    if last.kind != "answer":
        return None
    pair = last_answer(last.text, trajectory.reading, last.thinking)
    return pair or Pair("answer", 0, len(last.text), last.text)  # of a template with other tags than ours


def title_and_text(contents: str) -> tuple[str, str]:
    """A passage's title, which is its first line, and the rest."""
    title, _, text = contents.partition("\n")
    return title.strip().strip('"'), text


def search_call(number: int, found: Retrieved) -> dict[str, Any]:
    """A search as a tool call. number: counted from 1 in its trajectory."""
    documents = []
    for hit in found.hits:
        title, text = title_and_text(hit.contents)
        documents.append({"id": hit.id, "title": title, "text": text, "score": hit.score})
    return {
        "id": f"search_{number}",
        "type": "function",
        "function": {
            "name": "search",
            "arguments": json.dumps({"query": found.query}, ensure_ascii=False),
        },
        "documents": documents,
        "seconds": round(found.seconds, 6),
    }


def finish_reason(trajectory: Trajectory) -> str:
    """`stop` after an answer; `length` where turns or tokens were used up."""
    return "stop" if trajectory.finish == "answer" else "length"


def usage(trajectory: Trajectory) -> dict[str, int]:
    """Tokens of the prompt with what was observed, and of what the model wrote."""
    written = sum(len(a.token_ids) for a in trajectory.actions)
    read = len(trajectory.prompt_ids) + sum(
        len(s.token_ids) for s in trajectory.segments if not isinstance(s, Action)
    )
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def about(trajectory: Trajectory) -> dict[str, Any]:
    """What OpenAI's form has no place for."""
    turns: list[dict[str, Any]] = []
    for segment in trajectory.segments:
        if isinstance(segment, Action):
            searches = int(segment.document_ids is not None)
            turns.append({"kind": segment.kind, "tokens": len(segment.token_ids), "searches": searches})
        elif turns and not turns[-1]["searches"]:  # documents are those of the search
            turns[-1]["observed"] = segment.text
    return {
        "finish": trajectory.finish,
        "searches": trajectory.searches,
        "seconds": round(trajectory.seconds, 6),
        "turns": turns,
    }


def token_logprobs(trajectory: Trajectory, texts: list[list[str]]) -> dict[str, Any]:
    """Every token that the model wrote, in order. texts: of each action's tokens."""
    content = []
    for action, tokens in zip(trajectory.actions, texts, strict=True):
        for text, logprob in zip(tokens, action.logprobs, strict=True):
            one = {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            content.append(one)
    return {"content": content, "refusal": None}


class Told:
    """What the events of a trajectory amount to, as deltas of a message: their texts joined are those of the
    whole message."""

    def __init__(self) -> None:
        self.searches: list[dict[str, Any]] = []
        self._text = ""
        """Of the action in hand."""
        self._sent = 0
        """Characters of it that were given out."""
        self._searched = False
        """Whether the action was a search, whose documents stand for the observation."""

    def deltas(self, event: Event) -> Iterator[dict[str, Any]]:
        """What an event adds to the message."""
        if isinstance(event, Writing):
            self._text = event.text
            yield from self._reasoning(_surely_before_an_answer(event.text))
        elif isinstance(event, Searching | Observed):
            yield from self._reasoning(len(self._text))
            if isinstance(event, Searching):
                self._searched = True
                return
            yield {"reasoning_content": "\n"} | ({} if self._searched else {"observed": event.text})
            self._next_action()
        elif isinstance(event, Retrieved):
            self.searches.append(search_call(len(self.searches) + 1, event))
            yield {"searches": [self.searches[-1]]}
        elif isinstance(event, Restarted):
            self.searches = []
            self._next_action()
            yield {"restarted": True}

    def last(self, trajectory: Trajectory) -> Iterator[dict[str, Any]]:
        """What the end of the trajectory adds: the answer, and text that was held back for it."""
        self._text = trajectory.actions[-1].text
        pair = answer_pair(trajectory)
        if pair is None:
            yield from self._reasoning(len(self._text))
            return
        yield from self._reasoning(pair.start)
        yield {"content": pair.content.strip()}

    def _next_action(self) -> None:
        self._text = ""
        self._sent = 0
        self._searched = False

    def _reasoning(self, end: int) -> Iterator[dict[str, Any]]:
        if end > self._sent:
            text = self._text[self._sent : end]
            self._sent = end
            yield {"reasoning_content": text}


def _surely_before_an_answer(text: str) -> int:
    """Characters of a text, still being written, that no answer's tag can stand in."""
    found = text.find(ANSWER)
    if found >= 0:
        return found
    for size in range(min(len(ANSWER) - 1, len(text)), 0, -1):
        if text.endswith(ANSWER[:size]):
            return len(text) - size
    return len(text)


def message_of(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole message that deltas add up to."""
    return {
        "role": "assistant",
        "content": "".join(d.get("content", "") for d in deltas),
        "reasoning_content": "".join(d.get("reasoning_content", "") for d in deltas),
        "searches": [call for d in deltas for call in d.get("searches", ())],
    }
