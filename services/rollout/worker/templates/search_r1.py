"""The Search-R1 template (arXiv 2503.09516). Its text is wire data: checkpoints were trained on it, word for word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from services.contracts import Question
from services.rollout.worker.templates.base import TagTemplate

if TYPE_CHECKING:
    from retriever_service.client import Hit

PROMPT = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you get new information. "
    "After reasoning, if you find you lack some knowledge, you can call a search engine by <search> query </search> and it will return "
    "the top searched results between <information> and </information>. You can search as many times as your want. If you find no "
    "further external knowledge needed, you can directly provide the answer inside <answer> and </answer>, without detailed "
    "illustrations. For example, <answer> Beijing </answer>. Question: {question}\n"
)
"""One user turn."""
INVALID = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. If I want to give "
    "the final answer, I should put the answer between <answer> and </answer>. Let me try again.\n"
)


def user_turn(question: str) -> str:
    """The user's turn for a question; one without a question mark gets one."""
    question = question.strip()
    return PROMPT.replace("{question}", question if question.endswith("?") else f"{question}?")


class SearchR1Template(TagTemplate):
    """Prompt as one user turn (chat template where the tokenizer has one, else raw), documents as `Doc 1(Title: "X") text`."""

    head = "\n\n<information>"
    tail = "</information>\n\n"
    invalid = INVALID

    def prompt_ids(self, question: Question) -> list[int]:
        turn = question.prompt if question.prompt is not None else user_turn(question.text)
        system = [] if question.system is None else [{"role": "system", "content": question.system}]
        if self.tokenizer.chat_template:
            turn = self.tokenizer.apply_chat_template(
                [*system, {"role": "user", "content": turn}], tokenize=False, add_generation_prompt=True
            )
        elif system:
            turn = f"{question.system}\n\n{turn}"
        return self.encode(turn)

    def documents(self, hits: Sequence[Hit]) -> str:
        text = ""
        for i, hit in enumerate(hits, 1):
            title, _, body = hit.contents.partition("\n")
            text += f"Doc {i}(Title: {title}) {body}\n"
        return text
