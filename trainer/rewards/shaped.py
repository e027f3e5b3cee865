"""Search-R1's v0.3 shaping: part of the reward for the form of the trajectory, part for having retrieved the
answer."""

from __future__ import annotations

import re

from services.contracts import Action, Observation, Trajectory
from services.rollout.worker.tags import outside_thoughts
from trainer.rewards.answers import exact_match, final_answer, normalize

RIGHT_WELL_FORMED = 1.0
RIGHT_ILL_FORMED = 0.8
WRONG_RETRIEVED = 0.3
WRONG_WELL_FORMED = 0.2
WRONG_ILL_FORMED = 0.1

_TAG = re.compile(r"(</?(?:think|search|information|answer)>)")
_INFORMATION = re.compile(r"<information>(.*)</information>", re.DOTALL)
_NEXT = {
    ("start", "<think>"): "in think",
    ("in think", "</think>"): "thought",
    ("thought", "<search>"): "in search",
    ("in search", "</search>"): "searched",
    ("informed", "<think>"): "in think",
    ("thought", "<answer>"): "in answer",
    ("in answer", "</answer>"): "end",
}
"""Transitions of a well-formed trajectory; an observation leads from `searched` to `informed`. A call of a
tool goes as a search does."""


def format_reward(trajectory: Trajectory) -> float:
    """1 right and well-formed; 0.8 right, ill-formed; 0.3 wrong, well-formed, a golden answer was retrieved;
    0.2 wrong, well-formed; 0.1 an answer, ill-formed; 0 none.
    """
    answer = final_answer(trajectory)
    if answer is None:
        return 0.0
    formed = well_formed(trajectory)
    golden = trajectory.question.golden_answers
    if exact_match(answer, golden):
        return RIGHT_WELL_FORMED if formed else RIGHT_ILL_FORMED
    if not formed:
        return WRONG_ILL_FORMED
    return WRONG_RETRIEVED if retrieved(trajectory) else WRONG_WELL_FORMED


def well_formed(trajectory: Trajectory) -> bool:
    """Whether it is think, then (search or tool, information, think) any number of times, then the answer,
    with nothing but space between the tags.

    What stands in a document or, read `innermost`, in a think block does not matter. A notice after an
    invalid action makes it ill-formed.
    """
    innermost = trajectory.reading == "innermost"
    state = "in think" if innermost and trajectory.actions[0].thinking else "start"
    for segment in trajectory.segments:
        if isinstance(segment, Observation):
            if state != "searched":
                return False
            state = "informed"
            continue
        for part in _TAG.split(_as_search(segment, innermost)):
            if innermost and state == "in think" and part != "</think>":
                continue
            if _TAG.fullmatch(part):
                if (state, part) not in _NEXT:
                    return False
                state = _NEXT[state, part]
            elif part.strip() and not state.startswith("in "):
                return False
    return state == "end"


def retrieved(trajectory: Trajectory) -> bool:
    """Whether the results of a search held a golden answer, both normalised."""
    golden = [g for g in map(normalize, trajectory.question.golden_answers) if g]
    found = []
    previous = None
    for segment in trajectory.segments:
        if isinstance(segment, Observation) and previous is not None and previous.document_ids is not None:
            inside = _INFORMATION.search(segment.text)
            found.append(normalize(inside[1] if inside else segment.text))
        previous = segment if isinstance(segment, Action) else None
    return any(g in text for g in golden for text in found)


def _as_search(action: Action, innermost: bool) -> str:
    """The action's text up to the tag that ended it; of a tool's call, with the tags of a search in place of
    the tool's."""
    if action.tool is None:
        return _cut(action, innermost)
    text = _cut(action, innermost, f"</{action.tool}>")
    before, opening, call = text.rpartition(f"<{action.tool}>")
    return f"{before}<search>{call.removesuffix(f'</{action.tool}>')}</search>" if opening else text


def _cut(action: Action, innermost: bool, *more: str) -> str:
    """The action's text up to the tag that ended it: a token may carry a character or two past it, which
    nobody acts on. more: tags that end it too."""
    shown = outside_thoughts(action.text, action.thinking)[0] if innermost else action.text
    ends = [shown.index(tag) + len(tag) for tag in ("</search>", "</answer>", *more) if tag in shown]
    return action.text[: min(ends)] if ends else action.text
