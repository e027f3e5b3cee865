"""The laboratory's template: `lab_text` as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from services.contracts import Question
from services.rollout.worker.plain_text import Outside
from services.rollout.worker.templates import lab_text
from services.rollout.worker.templates.base import TagTemplate

if TYPE_CHECKING:
    from retriever_service.client import Hit


class LabTemplate(TagTemplate):
    """One word, one token: `<bos> question`, `<information> <doc> title body ... </information>`."""

    stop = lab_text.STOP
    tags = (*TagTemplate.tags, "doc")
    head = f"{lab_text.OPENING} "
    tail = f" {lab_text.CLOSING}"
    invalid = lab_text.INVALID

    def prompt_ids(self, question: Question) -> list[int]:
        return self.encode(lab_text.question_prompt(""), Outside(question.text))

    def documents(self, hits: Sequence[Hit]) -> str:
        return lab_text.documents([hit.contents for hit in hits])
