"""From a scored step to the records of its chosen trajectories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.contracts import Action, Observation, TokenBatch, Trajectory
from services.likelihood.metrics.scored_step import ScoredStep
from services.likelihood.microscope.held import LldsGate
from services.likelihood.microscope.record import Document, Observed, SampledTrajectory, Scoring, Written

Decode = Callable[[Sequence[int]], str]
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Stands where a text ends within a character."""
LONGEST_CHARACTER = 8
"""Tokens that may spell one character; more are no text."""


@dataclass(frozen=True)
class Lens:
    """What a trainer gives the microscope: how its tokens read, and why its rewards are what they are."""

    decode: Decode
    explain: Callable[[Trajectory], Scoring]


@dataclass(frozen=True)
class Slide:
    """The chosen trajectories of a step, cut out of it: nothing of it holds the other ones in memory."""

    trajectories: list[Trajectory]
    tokens: TokenBatch
    logp_new: np.ndarray | None
    """float32 [sum T], NaN on the rows that were not scored again."""
    rewards: list[float | None]
    advantages: list[float]
    right: list[bool | None]
    preserved: list[bool] | None
    """Which LLDS preserves; None where it is off."""
    gate: LldsGate | None

    @classmethod
    def of(
        cls, step: ScoredStep, rows: list[int], preserved: np.ndarray | None, gate: LldsGate | None
    ) -> Slide:
        """Rows of a step. preserved: bool [B]."""
        rewards = [step.rewards[row] for row in rows]
        known = [r is not None and bool(np.isfinite(r)) for r in rewards]
        places = [np.arange(step.tokens.offsets[row], step.tokens.offsets[row + 1]) for row in rows]
        taken = np.concatenate([np.zeros(0, np.int64), *places])
        return cls(
            trajectories=[step.trajectories[row] for row in rows],
            tokens=TokenBatch.take(step.tokens, rows),
            logp_new=None if step.logp_new is None else step.logp_new[taken],
            rewards=[r if finite else None for r, finite in zip(rewards, known, strict=True)],
            advantages=[float(step.advantages[row]) for row in rows],
            right=[None if step.right is None else step.right[row] for row in rows],
            preserved=[bool(preserved[row]) for row in rows] if preserved is not None and gate else None,
            gate=gate,
        )

    def part(self, first: int, last: int) -> Slide:
        """The trajectories from `first` up to `last`, without it."""
        rows = list(range(first, min(last, len(self.trajectories))))
        tokens = slice(int(self.tokens.offsets[rows[0]]), int(self.tokens.offsets[rows[-1] + 1]))
        picked = slice(first, last)
        return Slide(
            self.trajectories[picked],
            self.tokens.take(rows),
            None if self.logp_new is None else self.logp_new[tokens],
            self.rewards[picked],
            self.advantages[picked],
            self.right[picked],
            None if self.preserved is None else self.preserved[picked],
            self.gate,
        )

    def records(self, lens: Lens) -> list[SampledTrajectory]:
        """Their records. Takes some milliseconds per trajectory: call it off the learner's path."""
        return [self._record(row, lens) for row in range(len(self.trajectories))]

    def _record(self, row: int, lens: Lens) -> SampledTrajectory:
        trajectory = self.trajectories[row]
        preserved = None if self.preserved is None else self.preserved[row]
        reward = self.rewards[row]
        return SampledTrajectory.model_construct(
            uid=trajectory.uid,
            group=trajectory.group,
            question=trajectory.question.text,
            data_source=trajectory.question.data_source,
            prompt=lens.decode(trajectory.prompt_ids),
            reward=None if reward is None else float(reward),
            right=self.right[row],
            advantage=self.advantages[row],
            scoring=lens.explain(trajectory),
            preserved=preserved,
            finish=trajectory.finish,
            valid=all(action.kind != "invalid" for action in trajectory.actions),
            policy_version=trajectory.policy_version,
            worker=trajectory.worker or None,
            seconds=trajectory.seconds,
            segments=self._segments(row, lens.decode, preserved),
        )

    def _segments(self, row: int, decode: Decode, preserved: bool | None) -> list[Written | Observed]:
        trajectory = self.trajectories[row]
        before = self._by_action(row, self.tokens.logp_old)
        after = self._by_action(row, self.logp_new)
        sampler = self._by_action(row, self.tokens.logp_sampler)
        assert before is not None, "a scored step has logp_old"
        held: list[list[int]] | None = None
        if self.gate and preserved is not None and after is not None:
            held = self.gate.held(before, after) if preserved else [[] for _ in before]
        segments: list[Written | Observed] = []
        index = 0
        for segment in trajectory.segments:
            if isinstance(segment, Observation):
                segments.append(_observed(segment))
                continue
            columns: dict[str, Any] = {
                "logp_before": listed(before[index]),
                "logp_after": None if after is None else listed(after[index]),
                "logp_sampler": None if sampler is None else listed(sampler[index]),
                "held": None if held is None else held[index],
            }
            segments.append(_written(segment, decode, columns))
            index += 1
        return segments

    def _by_action(self, row: int, column: np.ndarray | None) -> list[np.ndarray] | None:
        """A column of the row's tokens, cut into its actions; None where the row has none."""
        if column is None:
            return None
        place = self.tokens.row(row)
        mask = self.tokens.action_ids[place]
        values = column[place][mask >= 0]
        if not np.isfinite(values).all():
            return None
        ends = np.cumsum(np.bincount(mask[mask >= 0], minlength=len(self.trajectories[row].actions)))
        return np.split(values, ends[:-1])


def token_texts(ids: Sequence[int], decode: Decode) -> list[str]:
    """The tokens as strings that together are `decode(ids)`. Of a character that several tokens spell, the
    last one holds it; text that a token changes behind itself goes to the token that settles it."""
    alone = [decode([token]) for token in ids]
    if "".join(alone) == decode(ids):
        return alone
    texts: list[str] = []
    begin = 0  # tokens before it no longer matter to what follows
    said = 0  # tokens whose text is settled
    for end in range(1, len(ids) + 1):
        old = decode(ids[begin:said])
        new = decode(ids[begin:end])
        unfinished = new.endswith(REPLACEMENT) and end < len(ids) and end - said < LONGEST_CHARACTER
        if unfinished or len(new) < len(old):
            texts.append("")
            continue
        texts.append(new[len(old) :])
        begin = said
        said = end
    return texts


def listed(logp: np.ndarray) -> list[float]:
    """Log-probs of a record. At most 0: one near 0 may come out a little above it."""
    values: list[float] = np.minimum(logp.astype(np.float64), 0.0).tolist()
    return values


def _observed(observation: Observation) -> Observed:
    return Observed.model_construct(
        by="environment", text=observation.text, tokens=len(observation.token_ids)
    )


def _written(action: Action, decode: Decode, columns: dict[str, Any]) -> Written:
    documents = None
    if action.document_ids is not None:
        texts: Sequence[str | None] = action.documents or [None] * len(action.document_ids)
        documents = [_document(*one) for one in zip(action.document_ids, texts, strict=True)]
    return Written.model_construct(
        by="model",
        kind=action.kind,
        tokens=token_texts(action.token_ids, decode),
        policy_version=action.policy_version,
        query=action.query,
        documents=documents,
        seconds=action.seconds,
        search_seconds=action.search_seconds,
        **columns,
    )


def _document(id: str, contents: str | None) -> Document:
    """Corpora of Search-R1 hold a title in quotes, a line break, and the text."""
    if contents is None:
        return Document.model_construct(id=id[:200], title=None, text=None)
    title, newline, text = contents.partition("\n")
    if not newline:
        return Document.model_construct(id=id[:200], title=None, text=contents)
    return Document.model_construct(id=id[:200], title=title.strip('"'), text=text)
