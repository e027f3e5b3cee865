"""What the grid of a step shows of a trajectory: a few numbers, kept beside it so that no text is read for
them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import BaseModel, ConfigDict

from services.likelihood.metrics.verdicts import is_right
from services.likelihood.microscope.record import SampledTrajectory

SHOWN = 200
"""Most characters of a question or an answer in a head."""


class Place(BaseModel):
    """One token of a trajectory, and the change of its log-prob that it is named for."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    segment: int
    """Index of its segment in the trajectory."""
    token: int
    """Its index in the segment."""
    nats: float


class SampleHead(BaseModel):
    """One sampled trajectory, without its text."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    uid: str
    group: str
    question: str | None = None
    """Its beginning, 200 characters at most."""
    data_source: str | None = None
    answer: str | None = None
    """The beginning of the answer that was scored."""
    reward: float | None = None
    right: bool | None = None
    """By the reward function; where that does not say, a reward of at least 1; without a reward, an advantage
    above 0. Null where nothing is known."""
    advantage: float
    preserved: bool | None = None
    finish: str | None = None
    valid: bool | None = None
    policy_version: int | None = None
    searches: int
    wasted: int
    """Searches without a document, or with the very documents of an earlier one."""
    tokens: int
    """That the model wrote."""
    change: float | None = None
    """Mean change of the log-prob per token, in nats: after the update - before. Null where it was not scored
    again."""
    falling: float | None = None
    """Share of its tokens that lost likelihood."""
    held: int | None = None
    """Tokens that LLDS pulls up; null where it is off."""
    lowest: Place | None = None
    """The token that lost most likelihood."""
    mismatch: Place | None = None
    """The token on which sampler and learner differ most."""
    probe: bool | None = None
    """True for a trajectory of an earlier step that was scored again at this one."""


def head_of(trajectory: SampledTrajectory) -> SampleHead:
    """The head of a trajectory."""
    written = trajectory.written
    tokens = sum(len(w.tokens) for w in written)
    scoring = trajectory.scoring
    held = [len(w.held) for w in written if w.held is not None]
    head = SampleHead(
        uid=trajectory.uid,
        group=trajectory.group,
        question=_beginning(trajectory.question),
        data_source=trajectory.data_source,
        answer=_beginning(scoring.answer) if scoring else None,
        reward=trajectory.reward,
        right=_right(trajectory),
        advantage=trajectory.advantage,
        preserved=trajectory.preserved,
        finish=trajectory.finish,
        valid=trajectory.valid,
        policy_version=trajectory.policy_version,
        searches=sum(w.documents is not None for w in written),
        wasted=_wasted(trajectory),
        tokens=tokens,
        held=sum(held) if held else None,
        probe=trajectory.probe,
    )
    changes = _by_token(trajectory, "logp_after")
    if tokens and changes is not None:
        head.change = float(np.mean(changes))
        head.falling = float(np.mean(changes < 0))
        head.lowest = _place(trajectory, changes, int(np.argmin(changes)))
    differences = _by_token(trajectory, "logp_sampler")
    if tokens and differences is not None:
        head.mismatch = _place(trajectory, differences, int(np.argmax(np.abs(differences))))
    return head


def _right(trajectory: SampledTrajectory) -> bool | None:
    """As services.likelihood.metrics.verdicts has it, but for the untrained."""
    if trajectory.right is not None:
        return trajectory.right
    if trajectory.reward is not None:
        return bool(is_right([trajectory.reward])[0])
    return trajectory.advantage > 0 if trajectory.advantage else None


def _by_token(trajectory: SampledTrajectory, name: str) -> np.ndarray | None:
    """A column of log-probs less those before the update, over all actions; None where one lacks it."""
    columns: list[Sequence[float] | None] = [getattr(w, name) for w in trajectory.written]
    known = [column for column in columns if column is not None]
    if not columns or len(known) < len(columns):
        return None
    before = np.concatenate([w.logp_before for w in trajectory.written])
    return np.concatenate(known) - before


def _place(trajectory: SampledTrajectory, values: np.ndarray, index: int) -> Place:
    at = index
    for number, segment in enumerate(trajectory.segments):
        if segment.by == "environment":
            continue
        if at < len(segment.tokens):
            return Place(segment=number, token=at, nats=float(values[index]))
        at -= len(segment.tokens)
    raise IndexError(f"token {index} of trajectory {trajectory.uid}")


def _wasted(trajectory: SampledTrajectory) -> int:
    seen: set[tuple[str, ...]] = set()
    wasted = 0
    for written in trajectory.written:
        if written.documents is None:
            continue
        found = tuple(document.id for document in written.documents)
        wasted += not found or found in seen
        seen.add(found)
    return wasted


def _beginning(text: str | None) -> str | None:
    return None if text is None else text[:SHOWN]
