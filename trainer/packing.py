"""Trajectories into micro-batches: which row trains in which optimiser step, on which rank, beside which others.

Everything here is a pure function of the batch and the settings, so every rank computes the same plan without talking.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from services.contracts import TokenBatch

Rows = list[int]


@dataclass
class MicroBatch:
    """Rows that go through the model together, padded on the right to the longest (B rows, T positions, N action tokens)."""

    rows: Rows
    """Index of each row in the batch; empty for a micro-batch that only keeps the ranks in step."""
    lengths: list[int]
    input_ids: Tensor  # int64 [B, T], 0 in the padding
    action_ids: Tensor  # int64 [B, T], -1 outside the action mask
    at: tuple[Tensor, Tensor]  # row and column of each action token, int64 [N] each
    advantages: Tensor  # float32 [B]
    preserved: Tensor  # bool [B]
    answer_mask: Tensor | None = None  # bool [B, T]
    logp_sampler: Tensor | None = None  # float32 [B, T]
    logp_old: Tensor | None = None  # float32 [B, T], as those below, which the learner fills in
    entropy_old: Tensor | None = None
    logp_ref: Tensor | None = None
    logp_anchor: Tensor | None = None
    """What LLDS compares with, where it is not logp_old."""

    def unpad(self, values: Tensor) -> np.ndarray:
        """[B, T] to the rows' own positions, one after the other: float32 [sum of lengths]."""
        host = values.detach().float().cpu().numpy()
        return np.concatenate([host[i, :n] for i, n in enumerate(self.lengths)]) if self.rows else np.zeros(0, np.float32)


def minibatches(rows: Rows, parts: int) -> list[Rows]:
    """The rows in their given order, cut into `parts` runs whose sizes differ by at most one. Empty runs are left out."""
    cuts = [i * len(rows) // parts for i in range(parts + 1)]
    return [rows[a:b] for a, b in pairwise(cuts) if b > a]


def deal(rows: Rows, lengths: np.ndarray, ranks: int, tokens_per_microbatch: int) -> list[list[Rows]]:
    """Rows of one optimiser step to ranks, and each rank's rows to micro-batches: [rank][micro-batch] -> rows.

    Rows are dealt from the longest to the shortest, forth and back, so that ranks get nearly equal numbers of tokens. A micro-batch
    holds at most `tokens_per_microbatch` tokens, padding counted; a row that is longer than that goes alone. Every rank gets the
    same number of micro-batches (the last may be empty): ranks meet in collective operations, and one that came less often would hang the rest.
    """
    by_length = sorted(rows, key=lambda b: (-lengths[b], b))
    hands: list[Rows] = [[] for _ in range(ranks)]
    for i, row in enumerate(by_length):
        lap, seat = divmod(i, ranks)
        hands[seat if lap % 2 == 0 else ranks - 1 - seat].append(row)
    packs = [_pack(hand[::-1], lengths, tokens_per_microbatch) for hand in hands]
    most = max(len(p) for p in packs)
    return [p + [[] for _ in range(most - len(p))] for p in packs]


def _pack(rows: Rows, lengths: np.ndarray, budget: int) -> list[Rows]:
    """Rows in ascending length into as few micro-batches as a greedy pass gives."""
    packs: list[Rows] = []
    for row in rows:
        if packs and (len(packs[-1]) + 1) * lengths[row] <= budget:
            packs[-1].append(row)
        else:
            packs.append([row])
    return packs


def make_microbatch(batch: TokenBatch, rows: Rows, device: torch.device) -> MicroBatch:
    """The tensors of some rows. No rows: one row of two tokens without an action, which costs nothing and has no loss.

    Raises ValueError where a row's first token is an action: nothing stands before it that could have predicted it.
    """
    lengths = [int(batch.offsets[b + 1] - batch.offsets[b]) for b in rows]
    shape = (max(len(rows), 1), max([2, *lengths]))

    def padded(column: np.ndarray | None, fill: float, dtype: torch.dtype) -> Tensor | None:
        if column is None:
            return None
        out = torch.full(shape, fill, dtype=dtype)
        for i, b in enumerate(rows):
            out[i, : lengths[i]] = torch.from_numpy(np.array(column[batch.row(b)])).to(dtype)
        return out.to(device)

    def per_row(column: np.ndarray | None, dtype: torch.dtype) -> Tensor:
        out = torch.zeros(shape[0], dtype=dtype)
        if column is not None:
            out[: len(rows)] = torch.from_numpy(np.array(column[rows])).to(dtype)
        return out.to(device)

    action_ids = padded(batch.action_ids, -1, torch.int64)
    at = (action_ids >= 0).nonzero(as_tuple=True)
    if bool((action_ids[:, 0] >= 0).any()):
        first = next(b for b in rows if batch.action_ids[batch.offsets[b]] >= 0)
        raise ValueError(
            f"trajectory {batch.uid[first]}: its first token is an action; a prompt of at least one token must come before"
        )
    return MicroBatch(
        rows=rows,
        lengths=lengths,
        input_ids=padded(batch.token_ids, 0, torch.int64),
        action_ids=action_ids,
        at=at,
        advantages=per_row(batch.extra.get("advantages"), torch.float32),
        preserved=per_row(batch.extra.get("preserved"), torch.bool),
        answer_mask=padded(batch.extra.get("answer_mask"), 0, torch.bool),
        logp_sampler=padded(batch.logp_sampler, 0, torch.float32),
        logp_old=padded(batch.logp_old, 0, torch.float32),
    )
