"""Trajectories into micro-batches: which row trains in which optimiser step, on which rank, beside which
others.

Everything here is a pure function of the batch and the settings, so every rank computes the same plan without
talking.

The model sees a micro-batch in one of two shapes; the loss always sees rows [B, T].

    padded  [B, T]   a a a . .      packed  [1, L]   a a a b b b b b c c . .
                     b b b b b           positions   0 1 2 0 1 2 3 4 0 1 0 1
                     c c . . .

L is the sum of the lengths, rounded up to LENGTH_STEP. Positions start anew at each row, and attention never
crosses from one row into another.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from services.contracts import TokenBatch, TrainBatch

Rows = list[int]
LENGTH_STEP = 256
"""Packed sequences have a length that is a multiple of this: few distinct shapes for the memory allocator and
the compiler."""


@dataclass(frozen=True)
class Segments:
    """Where the rows of a packed sequence begin and end. What fills it up to its length is a last segment of
    its own."""

    bounds: Tensor
    """0, the end of the first row, of the second, ...: on the device, int32 [S + 1]. (A list here would have
    torch.compile trace the layers anew for each S.)"""
    longest: int
    """At least the length of the longest segment (rounded up to a power of two)."""


@dataclass(frozen=True)
class Packed:
    """The rows of a micro-batch end to end, as the model sees them."""

    input_ids: Tensor  # int64 [1, L]
    position_ids: Tensor  # int64 [1, L], from 0 in each row
    at: tuple[Tensor, Tensor]  # row (0) and column of each action token, in the order of MicroBatch.at
    segments: Segments


@dataclass
class MicroBatch:
    """Rows that go through the model together, padded on the right to the longest (B rows, T positions, N
    action tokens)."""

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
    chosen: Tensor | None = None  # bool [B, T]
    """The tokens that the loss clip_cov or kl_cov acts on."""
    packed: Packed | None = None
    """The rows end to end, where the model is to see them so."""

    def unpad(self, values: Tensor) -> np.ndarray:
        """[B, T] to the rows' own positions, one after the other: float32 [sum of lengths]."""
        host = values.detach().float().cpu().numpy()
        return (
            np.concatenate([host[i, :n] for i, n in enumerate(self.lengths)])
            if self.rows
            else np.zeros(0, np.float32)
        )


def scored(values: Tensor | None) -> Tensor:
    """Log-probs or entropies that the learner has filled in by now."""
    assert values is not None, "this micro-batch was not scored"
    return values


def minibatches(rows: Rows, parts: int) -> list[Rows]:
    """The rows in their given order, cut into `parts` runs whose sizes differ by at most one. Empty runs are
    left out."""
    cuts = [i * len(rows) // parts for i in range(parts + 1)]
    return [rows[a:b] for a, b in pairwise(cuts) if b > a]


def deal(
    rows: Rows, lengths: np.ndarray, ranks: int, tokens_per_microbatch: int, *, packed: bool = False
) -> list[list[Rows]]:
    """Rows of one optimiser step to ranks, and each rank's rows to micro-batches: [rank][micro-batch] ->
    rows.

    Rows are dealt from the longest to the shortest, forth and back, so that ranks get nearly equal numbers of
    tokens. A micro-batch holds at most `tokens_per_microbatch` tokens, padding counted where there is any; a
    row that is longer than that goes alone. Every rank gets the same number of micro-batches (the last may be
    empty): ranks meet in collective operations, and one that came less often would hang the rest.
    """
    # Ties by row, so that every rank sorts alike: each computes the whole plan for itself.
    by_length = sorted(rows, key=lambda b: (-lengths[b], b))
    hands: list[Rows] = [[] for _ in range(ranks)]
    for i, row in enumerate(by_length):
        lap, seat = divmod(i, ranks)
        hands[seat if lap % 2 == 0 else ranks - 1 - seat].append(row)
    fill = _pack_tokens if packed else _pack
    # Ascending: `_pack` counts on it, and `_pack_tokens` turns it round.
    packs = [fill(hand[::-1], lengths, tokens_per_microbatch) for hand in hands]
    most = max(len(p) for p in packs)
    return [p + [[] for _ in range(most - len(p))] for p in packs]


def _pack(rows: Rows, lengths: np.ndarray, budget: int) -> list[Rows]:
    """Rows in ascending length into as few micro-batches as a greedy pass gives."""
    packs: list[Rows] = []
    for row in rows:
        # Ascending: the row that comes in is the longest so far, and sets the width of all.
        if packs and (len(packs[-1]) + 1) * lengths[row] <= budget:
            packs[-1].append(row)
        else:
            packs.append([row])
    return packs


def _pack_tokens(rows: Rows, lengths: np.ndarray, budget: int) -> list[Rows]:
    """Rows without padding: the longest that is left goes where it fits, first come first served."""
    packs: list[Rows] = []
    room: list[int] = []
    for row in reversed(rows):
        i = next((i for i, free in enumerate(room) if lengths[row] <= free), None)
        if i is None:
            packs.append([row])
            room.append(budget - int(lengths[row]))
        else:
            packs[i].append(row)
            room[i] -= int(lengths[row])
    return packs


def make_microbatch(
    batch: TokenBatch, rows: Rows, device: torch.device, *, packed: bool = False
) -> MicroBatch:
    """The tensors of some rows. No rows: one row of two tokens without an action, which costs nothing and has
    no loss. A batch that is no TrainBatch is only to be scored: its rows are in no preserved set.

    Raises ValueError where a row's first token is an action: nothing stands before it that could have
    predicted it.
    """
    lengths = [int(batch.offsets[b + 1] - batch.offsets[b]) for b in rows]
    # Two positions at least: a log-prob needs a token and one before it.
    shape = (max(len(rows), 1), max([2, *lengths]))

    def padded(column: np.ndarray, fill: float, dtype: torch.dtype) -> Tensor:
        out = torch.full(shape, fill, dtype=dtype)
        for i, b in enumerate(rows):
            # A copy: an array that came through Ray is read-only, which torch takes for a mistake.
            out[i, : lengths[i]] = torch.from_numpy(np.array(column[batch.row(b)])).to(dtype)
        return out.to(device)

    def log_probs(column: np.ndarray | None) -> Tensor | None:
        return None if column is None else padded(column, 0, torch.float32)

    def per_row(column: np.ndarray | None, dtype: torch.dtype) -> Tensor:
        out = torch.zeros(shape[0], dtype=dtype)
        if column is not None:
            out[: len(rows)] = torch.from_numpy(np.array(column[rows])).to(dtype)
        return out.to(device)

    train = batch if isinstance(batch, TrainBatch) else None
    answer_mask = train.answer_mask if train is not None else None
    action_ids = padded(batch.action_ids, -1, torch.int64)
    row_of, column_of = torch.nonzero(action_ids >= 0, as_tuple=True)
    at = (row_of, column_of)
    if bool((action_ids[:, 0] >= 0).any()):
        first = next(b for b in rows if batch.action_ids[batch.offsets[b]] >= 0)
        raise ValueError(
            f"trajectory {batch.uid[first]}: its first token is an action; a prompt of at least one token "
            "must come before"
        )
    input_ids = padded(batch.token_ids, 0, torch.int64)
    return MicroBatch(
        rows=rows,
        lengths=lengths,
        input_ids=input_ids,
        action_ids=action_ids,
        at=at,
        advantages=per_row(batch.advantages, torch.float32),
        preserved=per_row(train.preserved if train is not None else None, torch.bool),
        answer_mask=None if answer_mask is None else padded(answer_mask, 0, torch.bool),
        logp_sampler=log_probs(batch.logp_sampler),
        logp_old=log_probs(batch.logp_old),
        packed=_lay_end_to_end(input_ids, lengths or [2], at) if packed else None,
    )


def _lay_end_to_end(input_ids: Tensor, lengths: list[int], at: tuple[Tensor, Tensor]) -> Packed:
    """Rows [B, T] of these lengths as one sequence."""
    bounds = [0, *accumulate(lengths)]
    used = bounds[-1]
    # A segment of its own: no row attends to what only fills the sequence up.
    if spare := -used % LENGTH_STEP:
        bounds.append(used + spare)
    ids = torch.zeros((1, bounds[-1]), dtype=torch.int64, device=input_ids.device)
    ids[0, :used] = torch.cat([input_ids[i, :n] for i, n in enumerate(lengths)])
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(bounds)])[None].to(input_ids.device)
    starts = torch.tensor(bounds[: len(lengths)], device=input_ids.device)
    longest = max(b - a for a, b in pairwise(bounds))
    segments = Segments(
        torch.tensor(bounds, dtype=torch.int32, device=input_ids.device), 1 << (longest - 1).bit_length()
    )
    return Packed(ids, positions, (torch.zeros_like(at[0]), starts[at[0]] + at[1]), segments)
