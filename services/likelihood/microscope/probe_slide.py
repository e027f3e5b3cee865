"""Records of the fixed probe: trajectories of the first steps, as a later step has scored them again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from services.contracts import TokenBatch
from services.likelihood.microscope.building import Lens, listed, token_texts
from services.likelihood.microscope.record import GoldenAnswer, Observed, SampledTrajectory, Scoring, Written

Told = Callable[[str, int], dict[str, Any]]
"""Gives the line of a trajectory in the run's folder (`trajectories/step_000001.jsonl`), by its uid and its
step; empty where it is not there."""
KINDS = ("search", "answer", "tool", "invalid")


def group_of(uid: str) -> str:
    """The group of a trajectory: its uid without the number of the sample."""
    return uid.rpartition("-")[0] or uid


@dataclass(frozen=True)
class ProbeSlide:
    """Some rows of the fixed probe."""

    tokens: TokenBatch
    """With `logp_old`, from when they were frozen, and `step`."""
    logp_new: np.ndarray
    """float32 [sum T] in nats."""
    told: Told

    @classmethod
    def of(cls, tokens: TokenBatch, logp: np.ndarray, rows: list[int], told: Told) -> ProbeSlide:
        """Rows of the fixed set. logp: float32 [sum T] of all its rows."""
        places = np.concatenate([np.arange(*tokens.offsets[row : row + 2]) for row in rows])
        return cls(tokens.take(rows), logp[places], told)

    def records(self, lens: Lens) -> list[SampledTrajectory]:
        """Their records. Takes some milliseconds per trajectory: call it off the learner's path."""
        return [self._record(row, lens) for row in range(len(self.tokens))]

    def _record(self, row: int, lens: Lens) -> SampledTrajectory:
        uid = self.tokens.uid[row]
        assert self.tokens.step is not None, "the fixed set says which step sampled it"
        told = self.told(uid, int(self.tokens.step[row]))
        place = self.tokens.row(row)
        actions = self.tokens.action_ids[place]
        # Where an action or an observation begins; the prompt is the first part.
        cuts = [0, *(np.flatnonzero(np.diff(actions)) + 1).tolist(), len(actions)]
        parts = [slice(*cut) for cut in pairwise(cuts)]
        prompt = parts.pop(0) if parts and actions[0] < 0 else slice(0, 0)
        words = told.get("segments") or []
        if len(words) != len(parts):
            words = [{}] * len(parts)
        return SampledTrajectory.model_construct(
            uid=uid,
            group=group_of(uid),
            question=told.get("question"),
            data_source=told.get("data_source"),
            prompt=lens.decode(self.tokens.token_ids[place][prompt].tolist()),
            right=True,
            advantage=0.0,
            scoring=_scoring(told),
            probe=True,
            segments=[
                self._segment(place, part, said, lens) for part, said in zip(parts, words, strict=True)
            ],
        )

    def _segment(self, place: slice, part: slice, said: dict[str, Any], lens: Lens) -> Written | Observed:
        ids = self.tokens.token_ids[place][part].tolist()
        if self.tokens.action_ids[place][part][0] < 0:
            text = said.get("text")
            return Observed.model_construct(
                by="environment", text=lens.decode(ids) if text is None else text, tokens=len(ids)
            )
        assert self.tokens.logp_old is not None, "a frozen trajectory was scored"
        kind = said.get("kind")
        after = self.logp_new[place][part]
        return Written.model_construct(
            by="model",
            kind=kind if kind in KINDS else None,
            tokens=token_texts(ids, lens.decode),
            logp_before=listed(self.tokens.logp_old[place][part]),
            logp_after=listed(after) if np.isfinite(after).all() else None,
        )


def _scoring(told: dict[str, Any]) -> Scoring | None:
    golden = told.get("golden_answers")
    if not golden:
        return None
    return Scoring.model_construct(golden=[GoldenAnswer.model_construct(text=text) for text in golden])
