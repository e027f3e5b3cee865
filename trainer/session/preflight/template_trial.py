"""One call of each method of a template, as a rollout makes them: what fails in the middle of a step fails
here."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from retriever_service.answer import Hit
from services.contracts import Question
from services.rollout.worker.templates.base import Template

if TYPE_CHECKING:
    from services.settings import RolloutSettings

SHOWN = 60
WORD = "Rome"
HITS = [
    Hit("doctor-0", f"{WORD}\n{WORD} is a town in Italy.", 1.5),
    Hit("doctor-1", "Arl\nArl is a river.", 1.0),
]
LONG = [Hit("doctor-2", f"{WORD}\n" + f"{WORD} is a town. " * 2000, 1.5)]
SEARCH, ANSWER = f"<search> {WORD} </search>", "<answer> Italy </answer>"
OTHERS = ("I do not know.", "", "<search>", "</answer>")


def try_template(template: Template, settings: RolloutSettings, question: Question) -> list[str]:
    """What of its results a run takes and is most likely meant otherwise, a line each. Raises UserError where
    a method of a user's template raises, or returns what no run takes."""
    notes = []
    prompt = template.prompt_ids(question)
    shown = template.decode(prompt)
    if question.prompt is None and template.prompt_ids(replace(question, text=f"{WORD}?")) == prompt:
        notes.append(f"the prompt of another question is the same: {shown[:SHOWN]!r}")
    budget = settings.max_obs_tokens
    if WORD not in template.observation_ids(HITS, budget).text:
        notes.append(f"an observation of a passage of {WORD} holds no {WORD}")
    long = template.observation_ids(LONG, budget)
    if len(long.token_ids) > budget:
        notes.append(
            f"an observation of a long passage has {len(long.token_ids):,} tokens, more than "
            f"rollout.max_obs_tokens={budget}"
        )
    observations = [template.observation_ids([], budget), template.notice()]  # a search may find nothing
    if settings.tools:
        observations.append(template.result_ids("5", budget))  # type: ignore[attr-defined]  # seen before
    texts = [SEARCH, ANSWER, *OTHERS, *template.stop]
    kinds = [template.parse(text).kind for text in texts]
    if not hasattr(template, "written") and kinds[:2] != ["search", "answer"]:
        notes.append(
            f"`parse` reads {SEARCH} as {kinds[0]} and {ANSWER} as {kinds[1]}: a template with other tags "
            "has `written`, for a warm start"
        )
    if ends := getattr(template, "ends", None):
        for text in texts:
            ends(text)
    if following := getattr(template, "following", None):
        for observation in observations:
            following(prompt[-1:], observation)
    if shown_later := getattr(template, "shown_later", None):
        shown_later(prompt, prompt[-1:])
    return notes
