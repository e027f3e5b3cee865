"""Questions: files in, rows out, and the order in which a run takes them."""

from trainer.data.convert import convert
from trainer.data.cursor import PromptCursor
from trainer.data.questions import Questions, load_questions, validate

__all__ = ["PromptCursor", "Questions", "convert", "load_questions", "validate"]
