"""An environment: one object per trajectory, which remembers what the policy did before."""

from services.contracts import Question


class Guessing:
    def __init__(self, question: Question) -> None:
        self.answers = {answer.casefold() for answer in question.golden_answers}
        self.tries = 0

    def __call__(self, content: str) -> str:
        self.tries += 1
        return "right" if content.casefold() in self.answers else f"wrong {self.tries}"
