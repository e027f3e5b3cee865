"""A template: Search-R1's tags under a shorter instruction."""

from services.rollout.worker.plain_text import Outside
from services.rollout.worker.templates.base import TagTemplate


class Brief(TagTemplate):
    head = " <information> "
    tail = " </information> "
    invalid = " Write <search> , a tool's tag or <answer> . "

    def prompt_ids(self, question):
        return self.encode("Search with <search> , answer with <answer> : ", Outside(question.text))

    def documents(self, hits):
        return " ".join(hit.contents for hit in hits)
