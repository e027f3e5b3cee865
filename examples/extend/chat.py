"""A template in the model's own chat form: a system prompt, then the question as the user's turn."""

from services.rollout.worker.plain_text import Outside
from services.rollout.worker.templates.search_r1 import SearchR1Template, in_chat

SYSTEM = "Answer in <answer> answer </answer> . Look up what you do not know with <search> query </search> ."


class Chat(SearchR1Template):
    def prompt_ids(self, question):
        turns = [("system", [SYSTEM]), ("user", [Outside(question.text)])]
        return self.encode(*in_chat(self.tokenizer, turns))
