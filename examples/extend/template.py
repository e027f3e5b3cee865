"""A template: Search-R1's tags under a shorter instruction."""

from services.rollout.worker.plain_text import Outside
from services.rollout.worker.templates.base import TagTemplate


class Brief(TagTemplate):
    head = " <information> "
    tail = " </information> "
    invalid = " Write <search> , a tool's tag or <answer> . "

    def prompt_ids(self, question):
        calls = "".join(f"call <{name}> , " for name in self.tools)
        return self.encode(f"Search with <search> , {calls}answer with <answer> : ", Outside(question.text))

    def documents(self, hits):
        return " ".join(hit.contents for hit in hits)
