"""What is kept of a step token by token, for people to look at: chosen when the step is over, made into
records in the background."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from services.common.files import json_lines
from services.common.runs.paths import TRAJECTORIES
from services.contracts import TrainBatch, Trajectory
from services.likelihood.metrics.scored_step import ScoredStep
from services.likelihood.microscope.building import Lens, Slide
from services.likelihood.microscope.choice import chosen_rows
from services.likelihood.microscope.held import LldsGate
from services.likelihood.microscope.probe_slide import ProbeSlide, group_of
from services.likelihood.microscope.record import GoldenAnswer, Scoring
from trainer.loop.run.system import System
from trainer.loop.update.batches import text_of
from trainer.loop.update.probes import FixedScores
from trainer.rewards import final_answer
from trainer.rewards.answers import equal, normalize


@dataclass
class Microscope:
    """Chooses the trajectories of each step that the store keeps token by token."""

    system: System
    lens: Lens = field(init=False)
    _words: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Lines of the run's folder about trajectories of the fixed probe in this attempt, by uid."""
    _followed: set[str] = field(default_factory=set)
    """Those of the fixed probe that are kept, by uid."""

    def __post_init__(self) -> None:
        self.lens = Lens(self._decode, self._explain)

    def begin_attempt(self) -> None:
        """Forget the texts of earlier attempts, in which the same uids may have named other trajectories."""
        # A new dict: slides of the last attempt that the store's thread has yet to read fill their own.
        self._words = {}

    def slide(
        self, scored: ScoredStep, llds_lambda: float, min_drop: float, rules: Sequence[str]
    ) -> Slide | None:
        """The chosen trajectories of a step; None where none is kept. min_drop: what the update took for
        `algorithm.llds.min_drop`. rules: of the alarms that stand."""
        groups = self.system.config.store.trajectory_groups
        rows = chosen_rows(scored, sys.maxsize if groups == "all" else groups, rules)
        if not rows:
            return None
        llds = self.system.config.algorithm.llds
        gate = None
        unit = llds.unit
        # What is drawn by lot, or pulled whether it fell or not, can't be told from log-probs.
        if llds_lambda > 0 and llds.form != "nll" and unit != "random":
            gate = LldsGate(unit, llds.least_drop(min_drop))
        preserved = scored.tokens.preserved if isinstance(scored.tokens, TrainBatch) else None
        return Slide.of(scored, rows, preserved, gate)

    def probe(self, fixed: FixedScores | None) -> ProbeSlide | None:
        """Trajectories of the fixed probe, one per group; None where none are kept, or none was scored."""
        store = self.system.config.store
        if fixed is None or not store.trajectory_groups or fixed.tokens.step is None:
            return None
        first_of = {group_of(uid): row for row, uid in reversed([*enumerate(fixed.tokens.uid)])}
        rows = sorted(first_of.values())[: store.probe_trajectories]
        self._followed = {fixed.tokens.uid[row] for row in rows}
        told = partial(self._told, self._words)
        return ProbeSlide.of(fixed.tokens, fixed.logp, rows, told) if rows else None

    def _told(self, words: dict[str, dict[str, Any]], uid: str, step: int) -> dict[str, Any]:
        """What the run's folder says of a trajectory; empty where it does not hold it any more. Reads the
        file of a step once: of the fixed probe's few trajectories all that is needed stays in memory."""
        if uid not in words:
            file = self.system.folder.path / TRAJECTORIES / f"step_{step:06d}.jsonl"
            words |= {r["uid"]: r for r in json_lines(file) if r.get("uid") in self._followed}
        return words.setdefault(uid, {})

    def _decode(self, token_ids: Sequence[int]) -> str:
        return text_of(self.system.tokenizer, list(token_ids))

    def _explain(self, trajectory: Trajectory) -> Scoring:
        return scoring_of(trajectory, self.system.config.reward.kind)


def scoring_of(trajectory: Trajectory, kind: str) -> Scoring:
    """The answer of a trajectory beside the golden ones, normalised as exact match compares them. kind:
    `reward.kind`, which may weigh more than the answer."""
    answer = final_answer(trajectory)
    golden = [
        GoldenAnswer(text=g, normalized=normalize(g), equal=answer is not None and equal(answer, g))
        for g in trajectory.question.golden_answers
    ]
    return Scoring(
        function=kind[:200],
        answer=answer,
        normalized=None if answer is None else normalize(answer),
        golden=golden,
    )
