"""Prompts of which trajectories are kept in several steps: what the page through time is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ConfigDict

MOST_PROMPTS = 200
"""Prompts that a list names."""
MAX_PROMPT = 200
"""Most characters of a prompt's name."""
PromptGroup = tuple[str, str, bool]
"""Prompt, group, and whether the group is a probe's."""


class KeptPrompt(BaseModel):
    """A prompt, and in which steps trajectories of it are kept token by token."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    prompt: str
    """Its question, 200 characters at most; its group's name where no question was posted."""
    steps: int
    first: int
    last: int
    probe: bool
    """Whether a trajectory of it was scored again at later steps."""


def prompt_of(question: str | None, group: str) -> str:
    """By which name the occurrences of a prompt are found."""
    return (question or group)[:MAX_PROMPT]


def joined(held: Sequence[Sequence], new: Sequence[PromptGroup]) -> list[PromptGroup]:
    """What a step holds, and what further trajectories add to it."""
    return sorted({(prompt, group, probe) for prompt, group, probe in [*held, *new]})


def kept_prompts(by_step: Mapping[int, Sequence[PromptGroup]], limit: int) -> list[KeptPrompt]:
    """The prompts of some steps, in the order of `LikelihoodStore.prompts`."""
    found: dict[str, KeptPrompt] = {}
    for step in sorted(by_step):
        probes: dict[str, bool] = {}
        for prompt, _, probe in by_step[step]:
            probes[prompt] = probes.get(prompt, False) or probe
        for prompt, probe in probes.items():
            kept = found.setdefault(
                prompt, KeptPrompt(prompt=prompt, steps=0, first=step, last=step, probe=False)
            )
            kept.steps += 1
            kept.last = step
            kept.probe |= probe
    return sorted(found.values(), key=lambda k: (not k.probe, -k.steps, -k.last, k.prompt))[:limit]
