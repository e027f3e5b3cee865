"""The Search-R1 template (arXiv 2503.09516). Its text is wire data: checkpoints were trained on it, word for
word."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from services.common.errors import UserError
from services.common.printing.kinds import returned_kind
from services.contracts import Question
from services.rollout.worker.plain_text import Outside, put_before
from services.rollout.worker.templates.base import TagTemplate

if TYPE_CHECKING:
    from retriever_service.client import Hit
    from services.settings import RolloutSettings

PROMPT = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every time "
    "you get new information. After reasoning, if you find you lack some knowledge, you can call a search "
    "engine by <search> query </search> and it will return the top searched results between <information> "
    "and </information>. You can search as many times as your want. If you find no further external "
    "knowledge needed, you can directly provide the answer inside <answer> and </answer>, without detailed "
    "illustrations. For example, <answer> Beijing </answer>. Question: {question}\n"
)
"""One user turn."""
INVALID = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and "
    "</search>. If I want to give the final answer, I should put the answer between <answer> and </answer>. "
    "Let me try again.\n"
)


_TAG = re.compile(r"(</?(?:think|search|information|answer)>)")
_PLACE = "UNSPIRALOUTSIDETEXT"
"""Stands for text from outside while a chat template is rendered. A word, so that no chat template changes
it."""
DATE = "26 Jul 2024"
"""Today, for chat templates that ask for it (Llama 3.2 and later; the day is that of their own default): a
prompt must not change at midnight."""


def user_turn(question: str) -> str:
    """The user's turn for a question; one without a question mark gets one."""
    return "".join(own_turn(question))


def own_turn(question: str) -> list[str]:
    """The user's turn for a question, as pieces."""
    question = question.strip()
    before, _, after = PROMPT.partition("{question}")
    return [before, Outside(question if question.endswith("?") else f"{question}?"), after]


def instruction(text: str) -> list[str]:
    """An instruction of a data file, as pieces: its tags are markup, like ours."""
    return [part if i % 2 else Outside(part) for i, part in enumerate(_TAG.split(text))]


def given_turn(prompt: str, question: str) -> list[str]:
    """The user's turn that a data file carries, as pieces: an instruction up to the question."""
    before, asked, after = prompt.rpartition(question)
    return [*instruction(before), Outside(asked + after)] if asked else instruction(prompt)


def rendered(
    tokenizer: Any, messages: list[dict[str, str]], tools: list[dict[str, Any]] | None = None
) -> str:
    """The messages as the tokenizer's chat template shows them; the assistant's turn is begun."""
    given: dict[str, Any] = {"tools": tools} if tools else {}
    return tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, date_string=DATE, **given
    )


def in_chat(
    tokenizer: Any, turns: list[tuple[str, list[str]]], tools: list[dict[str, Any]] | None = None
) -> list[str]:
    """Turns, each a role and pieces (`("user", ["Answer: ", Outside(question.text)])`), as the tokenizer's
    chat template shows them, as pieces; the assistant's turn is begun. tools: what it may call. Raises
    UserError."""
    _check_turns(turns)
    outside: list[str] = []
    messages = []
    for role, pieces in turns:
        content = ""
        for piece in pieces:
            if isinstance(piece, Outside) and piece.strip():
                outside.append(Outside(piece.strip()))
                piece = piece.replace(piece.strip(), _PLACE)
            content += piece
        messages.append({"role": role, "content": content})
    shown = rendered(tokenizer, messages, tools).split(_PLACE)
    if len(shown) != len(outside) + 1:
        raise UserError(
            "the tokenizer's chat template does not show each turn as it is, once; expected one that does"
        )
    return [*(piece for pair in zip(shown, outside, strict=False) for piece in pair), shown[-1]]


TURNS = 'turns, each a role and a list of texts: [("system", [SYSTEM]), ("user", [Outside(question.text)])]'
"""What `in_chat` takes, as a user writes it."""


def _check_turns(turns: object) -> None:
    """Raises TypeError for another form: messages of a chat have one too, and a text is made of texts."""
    if not isinstance(turns, list | tuple):
        raise TypeError(f"in_chat: expected {TURNS}; found {returned_kind(turns)}")
    for number, turn in enumerate(turns):
        if not isinstance(turn, list | tuple) or len(turn) != 2 or not isinstance(turn[0], str):
            found = returned_kind(turn)
            if isinstance(turn, Mapping):
                found += f" with {', '.join(map(str, turn)) or 'nothing'}"
            raise TypeError(f"in_chat: expected {TURNS}; turn {number} is {found}")
        pieces = turn[1]
        if not isinstance(pieces, list | tuple):
            raise TypeError(
                f"in_chat: expected {TURNS}; of turn {number}, {turn[0]}, the second part is "
                f"{returned_kind(pieces)}" + (": put [ ] around it" if isinstance(pieces, str) else "")
            )
        if others := [returned_kind(one) for one in pieces if not isinstance(one, str)]:
            raise TypeError(f"in_chat: expected {TURNS}; of turn {number}, {turn[0]}, a piece is {others[0]}")


def numbered(hits: Sequence[Hit]) -> str:
    """Documents as Search-R1 shows them."""
    text = ""
    for i, hit in enumerate(hits, 1):
        title, _, body = hit.contents.partition("\n")
        text += f"Doc {i}(Title: {title}) {body}\n"
    return text


class SearchR1Template(TagTemplate):
    """Prompt as one user turn (in the chat template where the tokenizer has one), documents as `Doc
    1(Title: "X") text`."""

    head = "\n\n<information>"
    tail = "</information>\n\n"
    invalid = INVALID

    def __init__(self, tokenizer: Any, settings: RolloutSettings):
        super().__init__(tokenizer, settings)
        self.bos = put_before(tokenizer) if settings.bos == "tokenizer" else []

    def prompt_ids(self, question: Question) -> list[int]:
        if question.prompt is None:
            turn = own_turn(question.text)
        else:
            turn = given_turn(question.prompt, question.text)
        system = [] if question.system is None else instruction(question.system)
        if self.tokenizer.chat_template:
            turns = [("system", system), ("user", turn)] if system else [("user", turn)]
            return self.encode(*in_chat(self.tokenizer, turns))
        before = [*system, "\n\n"] if system else []
        return [*self.bos, *self.encode(*before, *turn)]

    def documents(self, hits: Sequence[Hit]) -> str:
        return numbered(hits)
