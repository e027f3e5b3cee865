"""Which groups of a step are kept token by token: a bounded number, alarmed and mixed ones first."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from services.contracts import Trajectory
from services.likelihood.metrics.scored_step import ScoredStep
from services.likelihood.metrics.verdicts import BEST_REWARD, known_rewards
from services.likelihood.microscope.weights import fall, weights_of


class StepColumns:
    """The columns of a scored step (`weights.Columns`). Made when they are asked for: there are thousands of
    trajectories, and the learner waits."""

    def __init__(self, step: ScoredStep) -> None:
        self.step = step

    @cached_property
    def advantage(self) -> np.ndarray:
        return np.asarray(self.step.advantages, np.float64)

    @cached_property
    def reward(self) -> np.ndarray:
        return known_rewards(self.step.rewards)

    @cached_property
    def tokens(self) -> np.ndarray:
        table = self.step.actions
        return np.bincount(table.row, table.tokens, len(self.step.trajectories))

    @cached_property
    def change(self) -> np.ndarray:
        table = self.step.actions
        lost = np.bincount(table.row, table.after - table.before, len(self.step.trajectories))
        return lost / np.maximum(self.tokens, 1)

    @cached_property
    def searches(self) -> np.ndarray:
        return np.asarray([t.searches for t in self.step.trajectories], np.float64)

    @cached_property
    def wasted(self) -> np.ndarray:
        return np.asarray([_wasted(t) for t in self.step.trajectories], np.float64)

    @cached_property
    def invalid(self) -> np.ndarray:
        kinds = ([a.kind for a in t.actions] for t in self.step.trajectories)
        return np.asarray(["invalid" in found for found in kinds], np.float64)

    @cached_property
    def unanswered(self) -> np.ndarray:
        return np.asarray([t.finish != "answer" for t in self.step.trajectories], np.float64)

    @cached_property
    def truncated(self) -> np.ndarray:
        return np.asarray([t.finish == "length" for t in self.step.trajectories], np.float64)

    @cached_property
    def mismatch(self) -> np.ndarray:
        tokens = self.step.tokens
        if tokens.logp_sampler is None:
            return np.full(len(tokens), np.nan)
        apart = np.where(tokens.action_ids >= 0, np.abs(tokens.logp_sampler - self.step.logp_old), 0.0)
        ends = np.append(apart, 0.0)  # reduceat takes no end that is past the last value
        return np.where(np.diff(tokens.offsets) > 0, np.maximum.reduceat(ends, tokens.offsets[:-1]), np.nan)


def chosen_rows(step: ScoredStep, groups: int, rules: Sequence[str] = ()) -> list[int]:
    """Rows of the trajectories of at most so many groups, in the order of the batch.

    First, for each rule of an alarm that stands, the group of the trajectory that weighs most in it. Then
    mixed groups (right and wrong answers), whose trajectories were scored again, those first whose answers
    with advantage >= 0 lost most likelihood; then the others in the same order.
    """
    if groups <= 0 or not step.trajectories:
        return []
    names: dict[str, int] = {}
    of_row = np.asarray([names.setdefault(t.group, len(names)) for t in step.trajectories])
    if len(names) <= groups:
        return list(range(len(step.trajectories)))
    columns = StepColumns(step)
    right = columns.reward >= BEST_REWARD if step.right is None else np.asarray(step.right, bool)
    most = np.bincount(of_row, minlength=len(names))
    good = np.bincount(of_row, right, len(names))
    scored = np.bincount(of_row, np.isfinite(columns.change), len(names)) / most
    lost = np.full(len(names), -np.inf)
    np.maximum.at(lost, of_row, fall(columns))
    order = np.lexsort((-lost, -scored, -((good > 0) & (good < most)).astype(int)))
    alarmed = [int(of_row[np.argmax(weights_of(columns, rule))]) for rule in rules]
    picked = list(dict.fromkeys([*alarmed, *order.tolist()]))[:groups]
    return np.flatnonzero(np.isin(of_row, picked)).tolist()


def _wasted(trajectory: Trajectory) -> int:
    found = [tuple(a.document_ids) for a in trajectory.actions if a.document_ids is not None]
    return sum(not documents or documents in found[:i] for i, documents in enumerate(found))
