"""One training step after its update. The step's metrics and its records are views of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from services.contracts import TokenBatch, Trajectory
from services.likelihood.metrics.action_table import ActionTable
from services.likelihood.metrics.step_metrics import (
    displacement_metrics,
    largest_drop,
    leak,
    likelihood_metrics,
    retrieval_metrics,
    reward_metrics,
    rollout_metrics,
    sampler_mismatch,
    search_errors,
    search_metrics,
    tool_round_metrics,
    unrewarded_share,
    update_divergence,
)
from services.likelihood.metrics.text_metrics import blank_documents, control_logp, text_metrics
from services.likelihood.metrics.verdicts import Verdict, verdicts


@dataclass(frozen=True)
class ScoredStep:
    """What was sampled in a step of B trajectories, what it earned, and its log-probs before and after the
    update. Built once, when the update is over."""

    trajectories: Sequence[Trajectory]
    tokens: TokenBatch
    """The same B trajectories as arrays. `logp_old` is set: log-probs before the update; values outside the
    action mask are ignored, NaN included."""
    rewards: Sequence[float | None]
    """None or NaN: the reward function gave nothing."""
    advantages: np.ndarray
    """float64 [B]."""
    right: Sequence[bool | None] | None = None
    """What the reward function says of each trajectory; see `verdicts` for None."""
    entropy: np.ndarray | float | None = None
    """Entropy of each position before the update, [sum T], or its mean over the action tokens; nats."""
    logp_new: np.ndarray | None = None
    """Log-probs after the update, [sum T], NaN on the rows that were not scored again. None: no row was."""
    control: np.ndarray | None = None
    """The tag tokens (`control_mask`), bool [sum T]. None: not known."""
    preserved: np.ndarray | None = None
    """The trajectories that LLDS preserves, bool [B]. None: a run that has no such set."""

    @property
    def logp_old(self) -> np.ndarray:
        """Log-probs before the update, [sum T], in nats."""
        if self.tokens.logp_old is None:
            raise ValueError("a scored step needs the log-probs before its update (tokens.logp_old)")
        return self.tokens.logp_old

    @cached_property
    def verdict(self) -> np.ndarray:
        """int [B], of `Verdict`."""
        return verdicts(self.rewards, self.advantages.tolist(), self.right)

    @cached_property
    def actions(self) -> ActionTable:
        """Every action of every trajectory."""
        return ActionTable.of_tokens(self.tokens, self.logp_old, self.logp_new)

    @cached_property
    def documents(self) -> list[list[list[str] | None]]:
        """The documents that each action of each trajectory got; None for one that did not search."""
        return [[a.document_ids for a in t.actions] for t in self.trajectories]

    def metrics(self, rollout_seconds: float | None = None) -> dict[str, float]:
        """Every metric of `step_metrics`. Trajectories without a reward, which have left the losses, are in
        none of those that concern likelihood."""
        groups = [t.group for t in self.trajectories]
        unknown = self.verdict == Verdict.UNKNOWN
        tokens, table = _without(self.tokens, unknown), self.actions.only(~unknown)
        out = likelihood_metrics(table, self.verdict)
        if self.logp_new is not None:
            out |= displacement_metrics(table, self.advantages, self.verdict)
            out |= update_divergence(tokens, self.logp_old, self.logp_new)
        if self.entropy is not None and (value := leak(tokens, self.logp_old, self.entropy)) is not None:
            out["leak/logp_entropy"] = value
        if self.control is not None:
            value = control_logp(tokens, self.logp_old, self.control)
            out |= {} if value is None else {"logp/control": value}
        return {
            **out,
            **self._preserved_metrics(tokens, table),
            **sampler_mismatch(tokens, self.logp_old),
            **reward_metrics(groups, self.rewards),
            **tool_round_metrics(table, [t.searches for t in self.trajectories]),
            **retrieval_metrics(groups, self.verdict, [_first_documents(t) for t in self.trajectories]),
            **search_metrics(self.documents),
            **search_errors(self.trajectories),
            **blank_documents(self.trajectories),
            **text_metrics(self.trajectories),
            **rollout_metrics(self.trajectories, rollout_seconds),
        }

    def _preserved_metrics(self, tokens: TokenBatch, table: ActionTable) -> dict[str, float]:
        """tokens, table: without the trajectories that have left the losses."""
        held = self.preserved
        if held is None:
            return {}
        groups = [t.group for t in self.trajectories]
        share = unrewarded_share(table, groups, self.rewards, self.right, held)
        drop = None if self.logp_new is None else largest_drop(tokens, self.logp_old, self.logp_new, held)
        found = {"llds/preserved_unrewarded": share, "llds/largest_drop": drop}
        return {name: value for name, value in found.items() if value is not None}

    def records(self) -> list[dict[str, Any]]:
        """The REST records of the step (`TrajectoryRecord`) as plain dicts, which cost the learner a tenth of
        the checked objects. Raises ValueError if a log-prob inside the mask is not finite."""
        table = self.actions
        bad = np.flatnonzero(~np.isfinite(table.before))
        if len(bad):
            row, index, value = table.row[bad[0]], table.index[bad[0]], table.before[bad[0]]
            raise ValueError(f"trajectory {self.tokens.uid[row]}: log-prob of action {index} is {value}")
        # A sum of log-probs near 0 may come out a little above it, which the service would refuse.
        before = np.minimum(table.before, 0.0).tolist()
        after = np.minimum(table.after, 0.0).tolist()
        actions: list[list[dict[str, Any]]] = [[] for _ in self.trajectories]
        places = zip(table.row.tolist(), table.index.tolist(), table.tokens.tolist(), strict=True)
        for i, (row, index, tokens) in enumerate(places):
            action = {
                "tokens": tokens,
                "logp_before": before[i],
                "logp_after": None if math.isnan(after[i]) else after[i],
                "documents": self.documents[row][index],
            }
            actions[row].append(action)
        said = [None] * len(self.trajectories) if self.right is None else self.right
        return [
            {
                "uid": t.uid,
                "group": t.group,
                "reward": float(reward) if reward is not None and np.isfinite(reward) else None,
                "advantage": float(advantage),
                "right": None if right is None else bool(right),
                "tool_rounds": t.searches,
                "actions": of_row,
            }
            for t, reward, advantage, right, of_row in zip(
                self.trajectories, self.rewards, self.advantages, said, actions, strict=True
            )
        ]


def _without(batch: TokenBatch, rows: np.ndarray) -> TokenBatch:
    """The batch with the action mask of some rows (bool [B]) emptied."""
    gone = np.repeat(rows, np.diff(batch.offsets))
    return dataclasses.replace(batch, action_ids=np.where(gone, np.int16(-1), batch.action_ids))


def _first_documents(trajectory: Trajectory) -> list[str] | None:
    return next((a.document_ids for a in trajectory.actions if a.document_ids is not None), None)
