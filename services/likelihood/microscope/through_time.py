"""One prompt through time: the trajectories of it that are kept token by token, step by step."""

from __future__ import annotations

import numpy as np

from services.likelihood.microscope.grid import Answer
from services.likelihood.microscope.prompts import prompt_of
from services.likelihood.microscope.record import SampledTrajectory, Written
from services.likelihood.store.base import LikelihoodStore

MOST_STEPS = 100
MOST_GROUPS = 4
"""Of each step."""
MOST_TRAJECTORIES = 32
"""Of each step."""
MOST_CHARS = 32 << 20
"""Characters of all trajectories together."""


class PromptStep(Answer):
    """The trajectories of a prompt at one step."""

    step: int
    trajectories: list[SampledTrajectory]
    """By group and uid, 32 at most."""


class PromptSteps(Answer):
    """The trajectories of a prompt at several steps."""

    run: str
    prompt: str
    kept: list[int]
    """All steps of which trajectories of the prompt are kept."""
    steps: list[PromptStep]
    """Those of the range, the first and the last among them; evenly spread where there are more than
    `limit`."""
    cut: bool
    """Whether later ones of these steps were left out, because the answer would be too large."""


def through_time(
    store: LikelihoodStore, run: str, prompt: str, first: int, last: int, limit: int
) -> PromptSteps:
    """A prompt at the steps from `first` to `last`, `limit` of them at most. Raises NotStored for a run that
    is not in the store."""
    groups = store.prompt_groups(run, prompt)
    asked = [step for step in groups if first <= step <= last]
    answer = PromptSteps(run=run, prompt=prompt, kept=list(groups), steps=[], cut=False)
    size = 0
    for step in spread(asked, limit):
        names = sorted(set(groups[step]))[:MOST_GROUPS]
        found = [t for name in names for t in store.samples(run, step, name)]
        found = [t for t in found if prompt_of(t.question, t.group) == prompt][:MOST_TRAJECTORIES]
        size += sum(map(size_of, found))
        if size > MOST_CHARS:
            answer.cut = True
            break
        answer.steps.append(PromptStep(step=step, trajectories=found))
    return answer


def spread(steps: list[int], limit: int) -> list[int]:
    """At most `limit` of some steps, evenly spread, the first and the last among them."""
    if len(steps) <= limit:
        return steps
    places = np.linspace(0, len(steps) - 1, limit).round().astype(int)
    return [steps[place] for place in places]


def size_of(trajectory: SampledTrajectory) -> int:
    """About as many characters as a trajectory takes in JSON."""
    size = len(trajectory.prompt or "") + len(trajectory.question or "")
    for segment in trajectory.segments:
        if isinstance(segment, Written):
            size += sum(map(len, segment.tokens)) + 40 * len(segment.tokens)
            size += sum(len(d.text or "") + len(d.title or "") for d in segment.documents or ())
        else:
            size += len(segment.text)
    return size
