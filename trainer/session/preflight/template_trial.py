"""One call of each method of a template, as a rollout makes them: what fails in the middle of a step fails
here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from retriever_service.answer import Hit
from services.contracts import Observation, Question
from services.rollout.worker.tags import last_answer
from services.rollout.worker.templates.base import Template, reading_of

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
SECRET = "zzyzx"
"""A golden answer that no prompt holds by itself."""
CONTROLS = 8
"""Control tokens that are tried in texts from outside."""
TOKENIZERS = {"bos", "eos", "pad", "s", "unk"}
"""Tags that tokenizers write by themselves."""
TAG = re.compile(r"</?([A-Za-z][\w-]*)>")


def try_template(
    template: Template,
    settings: RolloutSettings,
    question: Question,
    controls: Mapping[int, str] | None = None,
) -> list[str]:
    """What of its results a run takes and is most likely meant otherwise, a line each. controls: names of the
    tokenizer's control tokens, by id. Raises UserError where a method of a user's template raises, or returns
    what no run takes."""
    notes = []
    prompt = template.prompt_ids(question)
    shown = template.decode(prompt)
    if question.prompt is None and template.prompt_ids(replace(question, text=f"{WORD}?")) == prompt:
        notes.append(f"the prompt of another question is the same: {shown[:SHOWN]!r}")
    if template.prompt_ids(replace(question, golden_answers=(SECRET,))) != prompt:
        notes.append("the prompt depends on the golden answers, which a policy must not be shown")
    notes += untold_tags(template, settings, shown)
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
    notes += _let_through(template, settings, question, controls or {})
    texts = [SEARCH, ANSWER, *OTHERS, *template.stop]
    kinds = [template.parse(text).kind for text in texts]
    if not hasattr(template, "written") and kinds[:2] != ["search", "answer"]:
        notes.append(
            f"`parse` reads {SEARCH} as {kinds[0]} and {ANSWER} as {kinds[1]}: a template with other tags "
            "has `written`, for a warm start"
        )
    if unread := unread_answer(template):
        notes.append(
            f"{unread} is an answer to `parse` and none to scores: rewards that come with Unspiral, "
            "`final_answer` and held-out scores read <answer> and </answer> alone"
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


def unread_answer(template: Template) -> str | None:
    """An answer in the template's own tags that scores do not read; None where they read it, or where its
    form is not known."""
    texts = [f"<{found[1]}> {WORD} </{found[1]}>" for stop in template.stop if (found := TAG.fullmatch(stop))]
    if written := getattr(template, "written", None):
        texts.insert(0, "".join(written("answer", "", WORD)))
    answers = [text for text in texts if template.parse(text).kind == "answer"]
    unread = [text for text in answers if last_answer(text, reading_of(template)) is None]
    return unread[0] if unread and len(unread) == len(answers) else None


def untold_tags(template: Template, settings: RolloutSettings, shown: str) -> Iterator[str]:
    """Of the tags that end an action those that a prompt does not name. shown: its text."""
    ending = [found[1] for stop in template.stop if (found := TAG.fullmatch(stop))]
    # Of a tool without a tag, as in a family's own form of calls, the name will do.
    lacking = [f"<{name}>" for name in ending if f"<{name}>" not in shown]
    lacking += [n for n in settings.tools if n not in ending and not re.search(rf"\b{re.escape(n)}\b", shown)]
    if not lacking:
        return
    known = {*ending, *getattr(template, "tags", ()), *TOKENIZERS}
    others = dict.fromkeys(f"<{name}>" for name in TAG.findall(shown) if name not in known)
    beside = f"; it has {', '.join(others)}, which the template does not read" if others else ""
    yield (
        f"the prompt does not name {', '.join(lacking)}{beside}: a policy that was not trained with these "
        "tags writes what the prompt tells it; name them in `prompt_ids`, or in the `prompt` of the questions"
    )


def _let_through(
    template: Template, settings: RolloutSettings, question: Question, controls: Mapping[int, str]
) -> Iterator[str]:
    """Texts from outside whose control tokens become ids of control, each with a control token's name."""
    names = list(controls.values())[:CONTROLS]
    if not names:
        return
    budget = settings.max_obs_tokens

    def prompt(text: str) -> list[int]:
        given = None if question.prompt is None else question.prompt.replace(question.text, text)
        return template.prompt_ids(replace(question, text=text, prompt=given))

    def observation(text: str) -> Observation:
        return template.observation_ids([Hit("doctor-3", f"{WORD}\n{text}", 1.5)], budget)

    def result(text: str) -> Observation:
        return template.result_ids(text, budget)  # type: ignore[attr-defined]  # seen before

    ways = {"question": prompt, "passage": lambda text: observation(text).token_ids}
    if settings.tools:
        ways["tool's result"] = lambda text: result(text).token_ids
    for what, ids_of in ways.items():
        plain = ids_of(WORD)
        for name in names:
            ids = ids_of(f"{WORD} {name} {WORD}")
            if let := [controls[i] for i in controls if ids.count(i) > plain.count(i)]:
                yield (
                    f"a {what} that holds {let[0]} puts this control token into the policy's text, and may "
                    "end the turn: mark text from outside, self.encode(..., Outside(text))"
                )
                break


def untold(template: Template, settings: RolloutSettings, question: Question) -> list[str]:
    """The same of the tools of a template that comes with Unspiral, whose own tags its prompt names."""
    if not settings.tools:
        return []
    return list(untold_tags(template, settings, template.decode(template.prompt_ids(question))))
