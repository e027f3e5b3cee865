"""Templates of methods that are prompted and not trained: the baselines of the paper's tables (arXiv
2503.09516, section 4.2).

No paper prints its baselines' prompts; the words here are ours. All ask for `<answer>...</answer>`, so one
score reads them all. A prompt of a data file, which is an agent's, is not used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from retriever_service.client import Hit
from services.rollout.worker.plain_text import Outside
from services.rollout.worker.templates.search_r1 import SearchR1Template, in_chat

if TYPE_CHECKING:
    from services.contracts import Question
    from services.settings import RolloutSettings

FORM = (
    "Give the answer inside <answer> and </answer>, in a few words, for example <answer> Beijing </answer>."
)


class PromptedTemplate(SearchR1Template):
    """One user turn of our own: `words`, then the question. Tags, observations and notice are Search-R1's."""

    words: str

    def prompt_ids(self, question: Question) -> list[int]:
        turn = self.turn(question)
        if self.tokenizer.chat_template:
            return self.encode(*in_chat(self.tokenizer, [("user", turn)]))
        return [*self.bos, *self.encode(*turn)]

    def turn(self, question: Question) -> list[str]:
        """The user's turn, as pieces."""
        return [f"{self.words} Question: ", Outside(question.text.strip()), "\n"]


class DirectTemplate(PromptedTemplate):
    """The answer at once, from the model's own knowledge."""

    stop = ("</answer>",)
    words = f"Answer the question without any explanation. {FORM}"


class ChainOfThoughtTemplate(PromptedTemplate):
    """Thoughts step by step, then the answer; nothing is retrieved."""

    stop = ("</answer>",)
    words = f"Answer the question. First think step by step inside <think> and </think>. {FORM}"


class RetrievedTemplate(PromptedTemplate):
    """Retrieval-augmented generation: the passages of one search for the question itself
    (`Question.context`), cut to `max_obs_tokens`, stand before it."""

    stop = ("</answer>",)
    words = f"Answer the question with the help of the documents, without any explanation. {FORM}"

    def turn(self, question: Question) -> list[str]:
        """The user's turn, as pieces, with the documents."""
        hits = [Hit(str(i), self.harmless(text), None) for i, text in enumerate(question.context)]
        documents = Outside(self.documents(hits))
        room = self.settings.max_obs_tokens
        if len(self.first_ids(room + 1, documents)) > room:
            documents = Outside(
                self.decode(self.first_ids(room, documents)).rstrip("\N{REPLACEMENT CHARACTER}")
            )
        _, asked, end = super().turn(question)
        return [f"{self.words}\nDocuments:\n", documents, "\nQuestion: ", asked, end]


class SearchO1Template(PromptedTemplate):
    """Search by prompting alone, after Search-o1 (arXiv 2501.05366): a reasoning model is told that it may
    search in mid-thought, how often, and how such a search looks. Its second model call, which condenses the
    documents, is left out."""

    def __init__(self, tokenizer: Any, settings: RolloutSettings):
        self.words = (
            "You reason step by step, and can search an encyclopaedia. Whenever you are unsure of a fact, "
            "write "
            "<search> your query </search>; the results follow between <information> and </information>, "
            "and you "
            f"go on with your reasoning. You may search up to {settings.max_turns} times. A question about "
            f"the "
            "birthplace of a film's director, say, takes two searches: one for the director, and one for the "
            f"place. {FORM}"
        )
        super().__init__(tokenizer, settings)
