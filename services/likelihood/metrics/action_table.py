"""Log-probs summed by action: the form in which likelihood is stored, compared and plotted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.contracts import TokenBatch
from services.likelihood.records import TrajectoryRecord


@dataclass
class ActionTable:
    """One entry for each action of B trajectories, ordered by trajectory and then by action. Log-probs are
    sums over tokens, in nats."""

    rows: int
    """B, the trajectories (also those without any action)."""
    row: np.ndarray  # int64 [N], the trajectory of an action
    index: np.ndarray  # int64 [N], its place in the trajectory: 0, 1, ..
    tokens: np.ndarray  # int64 [N]
    before: np.ndarray  # float64 [N]
    after: np.ndarray  # float64 [N], NaN where it was not scored again

    @classmethod
    def of_tokens(cls, batch: TokenBatch, before: np.ndarray, after: np.ndarray | None = None) -> ActionTable:
        """From token arrays: `before` and `after` are log-probs [sum T]; values outside the action mask are
        ignored, NaN included."""
        lengths = np.diff(batch.offsets)
        row_of = np.repeat(np.arange(len(batch)), lengths)
        at = np.flatnonzero(batch.action_ids >= 0)
        width = int(batch.action_ids.max(initial=0)) + 1
        key = row_of[at] * width + batch.action_ids[at]
        tokens = np.bincount(key, minlength=len(batch) * width)
        keys = np.flatnonzero(tokens)

        def summed(values: np.ndarray | None) -> np.ndarray:
            if values is None:
                return np.full(len(keys), np.nan)
            return np.bincount(key, np.asarray(values)[at], minlength=len(tokens))[keys]

        return cls(len(batch), keys // width, keys % width, tokens[keys], summed(before), summed(after))

    @classmethod
    def of_records(cls, trajectories: Sequence[TrajectoryRecord]) -> ActionTable:
        """From REST records."""
        flat = [
            (b, k, a.tokens, a.logp_before, np.nan if a.logp_after is None else a.logp_after)
            for b, t in enumerate(trajectories)
            for k, a in enumerate(t.actions)
        ]
        row, index, tokens, before, after = zip(*flat, strict=True) if flat else [()] * 5
        return cls(
            len(trajectories),
            np.asarray(row, np.int64),
            np.asarray(index, np.int64),
            np.asarray(tokens, np.int64),
            np.asarray(before, np.float64),
            np.asarray(after, np.float64),
        )

    def only(self, rows: np.ndarray) -> ActionTable:
        """The actions of some trajectories (bool [B]); the others stay as trajectories without any."""
        kept = rows[self.row]
        columns = (self.row, self.index, self.tokens, self.before, self.after)
        return ActionTable(self.rows, *(column[kept] for column in columns))

    @property
    def change(self) -> np.ndarray:
        """Displacement of each action: `after - before`, NaN where it was not scored again. Negative is
        bad."""
        return self.after - self.before

    def per_row(self, values: np.ndarray) -> np.ndarray:
        """float64 [B]: the sum over each trajectory's actions (0 for one without)."""
        return np.bincount(self.row, values, minlength=self.rows)

    def mean_per_token(self, values: np.ndarray, chosen: np.ndarray) -> float | None:
        """Sum of the chosen actions' values over the number of *their own* tokens; None if there are none."""
        count = self.tokens[chosen].sum()
        return float(values[chosen].sum() / count) if count else None
