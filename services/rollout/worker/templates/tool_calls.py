"""Templates in a model family's own form of tool calls: search is a tool that the chat template shows.

The family's chat template writes all that surrounds the model: the description of the tool in the prompt, and
the turn in which a result comes back. No wording of a family is repeated here, only how its calls are read:

    hermes    <tool_call>\\n{"name": "search", "arguments": {"query": "..."}}\\n</tool_call>    Qwen2.5, Qwen3
    llama3    {"name": "search", "parameters": {"query": "..."}}<|eot_id|>                    Llama 3.1 to 3.3

The answer stands in `<answer>...</answer>`, as in every template, since that is what scores read.

The chat template is rendered once, with places that are filled in later. A whole conversation is never
rendered again, so what the model wrote keeps its tokens, and the ids of turn k are a prefix of those of
turn k + 1, unless the family drops the thoughts of earlier turns (`thoughts.py`).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from services.common.errors import UserError
from services.common.records.files import json_value
from services.contracts import Observation
from services.rollout.worker.plain_text import Outside
from services.rollout.worker.tags import last_answer, outside_thoughts
from services.rollout.worker.templates.base import ParsedAction, TagTemplate
from services.rollout.worker.templates.search_r1 import in_chat, numbered, rendered
from services.rollout.worker.templates.thoughts import Dropping, dropping

if TYPE_CHECKING:
    from retriever_service.client import Hit
    from services.contracts import Question
    from services.settings import RolloutSettings

TOOL = "search"
DESCRIPTION = "Search an encyclopaedia. Returns the passages that fit the query best."
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": TOOL,
            "description": DESCRIPTION,
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string", "description": "The words to search for."}},
                "required": ["query"],
            },
        },
    }
]
"""As chat templates take them."""
WORDS = (
    "Answer the question. Think first. If you lack knowledge, call the tool search, as often as you need. "
    "Give the final answer inside <answer> and </answer>, in a few words, for example "
    "<answer> Beijing </answer>. Question: "
)
"""Before the question; the words are ours."""
INVALID = (
    "There was neither a valid call of search nor an answer. Call search with a query, or answer inside "
    "<answer> and </answer>."
)
"""The result of a call that is none. A user's turn would not do: families drop the thoughts before one."""
NOTHING_FOUND = "No passage was found."
WRITTEN = "UNSPIRALWRITTENTEXT"
QUESTION = "UNSPIRALQUESTION"
RESULT = "UNSPIRALRESULT"
SHOWN = 90
"""Characters of a call that a message shows."""
_QUOTED = '\n"'
"""Shows whether a chat template writes results as JSON text."""


class ToolCallTemplate(TagTemplate, ABC):
    """A search tool in the tokenizer's own chat template. Raises UserError for a chat template that shows no
    tools, and, while `rollout.thoughts` is `family`, for one that drops some earlier thoughts and leaves
    others."""

    tags = (*TagTemplate.tags, "tool_call", "tool_response")
    reads_prompts = False
    """Whether a prompt of the data file is used."""
    family: str
    """Its name in `rollout.template`."""

    def __init__(self, tokenizer: Any, settings: RolloutSettings):
        self._where = f"rollout.template={self.family}"
        if settings.tools:
            raise UserError(
                f"{self._where}: knows search alone; rollout.tools ({', '.join(settings.tools)}) needs "
                "search_r1 or a template of your own"
            )
        if not tokenizer.chat_template:
            raise UserError(
                f"{self._where}: the tokenizer has no chat template; accepted is one that shows tools"
            )
        self._json = False
        self.head, self.tail = self._around_a_result(tokenizer)
        self.invalid = f"{self.head}{self._as_result(INVALID)}{self.tail}"
        super().__init__(tokenizer, settings)
        # Which of them ends a turn shows in the text before a result: it begins with that token.
        self._ends = {i for i in tokenizer.all_special_ids if self.decode([i]) not in self.stop}
        self.turn_end = self.decode([i for i in self._head[:1] if i in self._ends])
        """The control token with which the family ends a turn; empty where it has none."""
        self._refuse_other_calls()
        self._dropping = self._drops() if settings.thoughts == "family" else None
        self._opener = self.encode(self._dropping.opener) if self._dropping else []
        if self._opener and self._tail[-len(self._opener) :] != self._opener:
            raise UserError(
                f"{self._where}: the tokenizer joins the text with which the chat template opens a thought "
                "to the text before it, so that it cannot be dropped; accepted is rollout.thoughts=keep"
            )

    def _around_a_result(self, tokenizer: Any) -> tuple[str, str]:
        """The text between the model's own and a result, and from there to where the model goes on."""
        shown = rendered(tokenizer, [*_asked(), *_called(WRITTEN, f"{RESULT}{_QUOTED}{RESULT}")], TOOLS)
        first, *_ = shown.partition(WRITTEN)
        parts = shown.rpartition(WRITTEN)[2].split(RESULT)
        if DESCRIPTION not in first or WRITTEN not in shown or len(parts) != 3:
            raise UserError(
                f"{self._where}: the tokenizer's chat template does not show tools and their results; "
                "expected one of a family that calls tools, or rollout.template=search_r1"
            )
        self._json = parts[1] != _QUOTED
        return parts[0], parts[2]

    def _refuse_other_calls(self) -> None:
        """A family that is asked for calls in another form than is read here would never search."""
        written = call_shown(self.tokenizer)
        if WRITTEN in written and WRITTEN not in [query for _, query in self.calls(written)]:
            form = " ".join([*written.partition(WRITTEN)[0].split(), "QUERY"])[-SHOWN:]
            raise UserError(
                f"{self._where}: the model's chat template writes calls in another form ({form}), which is "
                "not read; accepted is rollout.template=search_r1, or a template of your own"
            )

    def _drops(self) -> Dropping | None:
        try:
            return dropping(self.tokenizer, TOOLS, TOOL)
        except UserError as e:
            raise UserError(f"{self._where}: {e}; accepted is rollout.thoughts=keep") from None

    @property
    def drops_thoughts(self) -> bool:
        """Whether a turn is shown without the thoughts of earlier ones: then trajectories with more than one
        turn are no one sequence to train on."""
        return self._dropping is not None

    def shown_later(self, before: Sequence[int], action_ids: Sequence[int]) -> list[int]:
        """What a later turn is shown of a context and the action that followed it."""
        if self._dropping is None:
            return [*before, *action_ids]
        opened = len(self._opener)
        begun = before[:-opened] if opened and list(before[-opened:]) == self._opener else before
        return [*begun, *self._dropping.left(action_ids, self.decode, self.encode)]

    def prompt_ids(self, question: Question) -> list[int]:
        """One user turn. The prompt of a data file is left out: it asks for other tags."""
        text = question.text.strip()
        turn = [WORDS, Outside(text if text.endswith("?") else f"{text}?")]
        return self.encode(*in_chat(self.tokenizer, [("user", turn)], TOOLS))

    def documents(self, hits: Sequence[Hit]) -> str:
        return self._as_result(numbered(hits).rstrip("\n") if hits else NOTHING_FOUND)

    def _as_result(self, text: str) -> str:
        return json.dumps(text, ensure_ascii=False)[1:-1] if self._json else text

    def following(self, action_ids: Sequence[int], observation: Observation) -> Observation:
        """The observation after an action: without the end of the model's turn where the model has written
        one itself."""
        ended = bool(action_ids) and action_ids[-1] in self._ends
        if not self.turn_end or not ended:
            return observation
        return Observation(observation.token_ids[1:], observation.text.removeprefix(self.turn_end))

    def parse(self, text: str) -> ParsedAction:
        """A call of search with a query, or an answer; where there are both, the first."""
        answer = last_answer(text, self.reading)
        shown, opened = outside_thoughts(text)
        call = next(self.calls(shown[:opened]), None)
        if answer and not (call and call[0] < answer.start):
            return ParsedAction("answer", answer.content.strip())
        return ParsedAction("search", call[1]) if call else ParsedAction("invalid", "")

    @abstractmethod
    def calls(self, text: str) -> Iterator[tuple[int, str]]:
        """Where a call of search begins, and its query. text: without thoughts."""

    def written(self, kind: str, thought: str, content: str) -> list[str]:
        """An action as a model of the family writes it, as pieces, for demonstrations."""
        words = ["<think> ", Outside(thought), " </think>\n"]
        if kind == "answer":
            return [*words, "<answer> ", Outside(content), " </answer>"]
        before, after = self.call_text(WRITTEN).split(WRITTEN)
        query = Outside(json.dumps(content, ensure_ascii=False)[1:-1])
        # A call without a closing tag of its own ends with the turn.
        end = "" if any(stop in after for stop in self.stop) else self.turn_end
        return [*words, before, query, after + end]

    @abstractmethod
    def call_text(self, query: str) -> str:
        """A call of search, as the family writes it."""


class HermesTemplate(ToolCallTemplate):
    """Qwen2.5 and Qwen3: calls in `<tool_call>` tags."""

    family = "hermes"
    stop = ("</tool_call>", "</answer>")

    def calls(self, text: str) -> Iterator[tuple[int, str]]:
        start = text.find("<tool_call>")
        while start >= 0:
            end = text.find("</tool_call>", start)
            if end < 0:
                return
            # The innermost: one that was only mentioned before it opened nothing.
            last = text.rfind("<tool_call>", start, end)
            query = _query(
                json_value(text[last + len("<tool_call>") : end].strip(), strict=False), "arguments"
            )
            if query:
                yield last, query
            start = text.find("<tool_call>", end)

    def call_text(self, query: str) -> str:
        return f'<tool_call>\n{{"name": "{TOOL}", "arguments": {{"query": "{query}"}}}}\n</tool_call>'


class Llama3Template(ToolCallTemplate):
    """Llama 3.1 to 3.3: a call is a JSON object, which the end of the turn ends."""

    family = "llama3"
    stop = ("</answer>",)

    def calls(self, text: str) -> Iterator[tuple[int, str]]:
        start = text.find("{")
        while start >= 0:
            try:
                found, end = json.JSONDecoder(strict=False).raw_decode(text, start)
            except (ValueError, RecursionError):
                end = start + 1
            else:
                if query := _query(found, "parameters"):
                    yield start, query
            start = text.find("{", end)

    def call_text(self, query: str) -> str:
        return f'{{"name": "{TOOL}", "parameters": {{"query": "{query}"}}}}'


def call_shown(tokenizer: Any) -> str:
    """A call of search for WRITTEN as the chat template writes it; without WRITTEN where it writes none."""
    call = {"type": "function", "function": {"name": TOOL, "arguments": {"query": WRITTEN}}}
    turn: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        shown = rendered(tokenizer, [{"role": "user", "content": QUESTION}, turn], TOOLS)
    except (TypeError, TemplateError):  # it takes calls of another shape than most
        return ""
    return shown.rpartition(QUESTION)[2]


def _asked() -> list[dict[str, str]]:
    return [{"role": "user", "content": "?"}]


def _called(written: str, result: str) -> list[dict[str, str]]:
    """A turn of the model, and what a tool gave back. The call is in the turn's text: chat templates write a
    call that is given as an object in their own spelling, which need not be the model's."""
    return [
        {"role": "assistant", "content": written},
        {"role": "tool", "name": TOOL, "content": result},
    ]


def _query(call: Any, arguments: str) -> str:
    """The query of a call of search; empty where it is another call, or none."""
    if not isinstance(call, dict) or call.get("name") != TOOL:
        return ""
    given = call.get(arguments)
    given = json_value(given.strip(), strict=False) if isinstance(given, str) else given
    query = given.get("query") if isinstance(given, dict) else None
    return query.strip() if isinstance(query, str) else ""
