"""For other trainers: REST records and the lag probe from padded [B, T] arrays. No torch is imported; its
tensors are accepted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from services.common.errors import UserError
from services.contracts import TokenBatch
from services.likelihood.metrics.action_table import ActionTable
from services.likelihood.metrics.verdicts import known_rewards, probe_rows


def array(values: Any) -> np.ndarray:
    """A NumPy array of a tensor (on any device, of any float type), list or array."""
    if hasattr(values, "detach"):
        values = values.detach().float().cpu()
    return np.asarray(values)


ABOVE_ZERO = 0.01
"""Nats above 0 that a log-prob may have by rounding."""


def padded_records(
    mask: Any,
    before: Any,
    advantages: Any,
    groups: Sequence[str],
    *,
    after: Any = None,
    rewards: Any = None,
    right: Any = None,
    uids: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """REST trajectory records (`TrajectoryRecord`) of a batch of padded completions.

    mask: [B, T], true on tokens that the model wrote; each unbroken run of them is one action. before, after:
    [B, T] log-probs in nats (anything outside the mask). advantages: [B], or [B, T] with the same value on
    all tokens of a row. groups: [B], the same for the samples of one prompt. rewards: [B], NaN where there is
    none. right: [B] bool, `is_right(rewards, right_at)` where the best reward is not 1. uids: [B], unique
    within the step; numbers by default. Raises UserError where the shapes do not fit each other, or a
    log-prob is above 0.
    """
    inside = array(mask) > 0.5
    advantages = array(advantages)
    _check_shapes(inside, before, after, advantages, {"groups": groups, "rewards": rewards, "right": right})
    if advantages.ndim == 2:
        advantages = np.where(inside, advantages, 0).sum(1) / np.maximum(inside.sum(1), 1)
    advantages = np.nan_to_num(advantages.astype(np.float64))
    scores = [
        None if np.isnan(r) else float(r) for r in known_rewards([] if rewards is None else array(rewards))
    ]
    said = {} if right is None else {b: bool(r) for b, r in enumerate(array(right))}
    starts = inside & ~np.pad(inside, ((0, 0), (1, 0)))[:, :-1]
    batch = _tokens(inside, np.where(inside, np.cumsum(starts, 1) - 1, -1))
    table = ActionTable.of_tokens(
        batch, array(before).ravel(), None if after is None else array(after).ravel()
    )
    actions: list[list[dict[str, Any]]] = [[] for _ in inside]
    columns = zip(
        table.row.tolist(), table.tokens.tolist(), table.before.tolist(), table.after.tolist(), strict=True
    )
    for row, tokens, old, new in columns:
        actions[row].append(
            {
                "tokens": tokens,
                "logp_before": min(old, 0.0),
                "logp_after": min(new, 0.0) if new == new else None,
            }
        )
    return [
        {
            "uid": uids[b] if uids is not None else str(b),
            "group": str(groups[b]),
            "reward": scores[b] if scores else None,
            "advantage": float(advantages[b]),
            **({"right": said[b]} if b in said and scores[b : b + 1] != [None] else {}),
            "tool_rounds": max(0, len(actions[b]) - 1),
            "actions": actions[b],
        }
        for b in range(len(inside))
    ]


def _check_shapes(
    inside: np.ndarray, before: Any, after: Any, advantages: np.ndarray, of_rows: Mapping[str, Any]
) -> None:
    if inside.ndim != 2:
        raise UserError(f"mask: expected [B, T], got {_shape(inside)}")
    rows = len(inside)
    for name, values in (("before", before), ("after", after)):
        if values is None:
            continue
        logp = array(values)
        if logp.shape != inside.shape:
            raise UserError(f"{name}: expected {_shape(inside)} as mask has, got {_shape(logp)}")
        if inside.any() and (highest := float(np.nanmax(np.where(inside, logp, -np.inf)))) > ABOVE_ZERO:
            raise UserError(f"{name}: expected log-probs, which are at most 0, got {highest:g}")
    if advantages.shape not in (inside.shape, (rows,)):
        raise UserError(
            f"advantages: expected [{rows}] or {_shape(inside)}, as mask has, got {_shape(advantages)}"
        )
    for name, values in of_rows.items():
        if values is not None and len(values) != rows:
            raise UserError(f"{name}: expected {rows}, one per row of mask, got {len(values)}")


def _shape(values: np.ndarray) -> str:
    return str(list(values.shape))


class LagMemory:
    """The lag probe for a trainer without a store of token arrays: right rows of the last batches, kept in
    memory and scored again."""

    def __init__(self, lag_steps: int = 5, size: int = 64):
        self.lag_steps = lag_steps
        self.size = size
        self._kept: deque[tuple[Mapping[str, Any], np.ndarray, np.ndarray]] = deque(maxlen=lag_steps)

    def probe(
        self,
        batch: Mapping[str, Any],
        mask: Any,
        before: Any,
        advantages: Any,
        score: Callable[[Mapping[str, Any]], Any],
        *,
        right: Any = None,
    ) -> float | None:
        """Call it once per step, after the update: `probe/lag`, the mean change per token of the right rows
        of `lag_steps` steps ago.

        batch: tensors with B rows, whatever `score` needs; score(batch) -> [B, T] log-probs under the weights
        of now. right: [B] bool, `is_right(rewards, right_at)`; a trainer that knows no rewards leaves it out,
        and advantages above 0 stand in. The other arguments as in `padded_records`. None while there is
        nothing to compare with.
        """
        change = None
        if len(self._kept) == self.lag_steps:
            kept, inside, old = self._kept[0]
            if inside.any():
                change = float((array(score(kept)) - old)[inside].mean())
        advantages = array(advantages)
        tokenwise = advantages.ndim == 2  # 0 outside the mask
        lowest = advantages.min(1) if tokenwise else advantages
        highest = advantages.max(1) if tokenwise else advantages
        rows = probe_rows(highest > 0 if right is None else array(right) > 0.5, lowest)[: self.size]
        kept_batch = {k: v[rows] for k, v in batch.items()}
        self._kept.append((kept_batch, (array(mask) > 0.5)[rows], array(before)[rows]))
        return change


def _tokens(inside: np.ndarray, action_ids: np.ndarray) -> TokenBatch:
    rows, width = inside.shape
    flat = action_ids.ravel().astype(np.int16)
    return TokenBatch(
        [str(b) for b in range(rows)], np.arange(rows + 1) * width, np.zeros(flat.size, np.int32), flat
    )
