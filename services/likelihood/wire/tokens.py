"""Token arrays on the wire: one npz body for the trajectories of a step."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from services.common.errors import UserError
from services.contracts import TokenBatch
from services.likelihood.wire.npz import read_arrays

NEEDED = {"offsets": np.integer, "token_ids": np.integer, "action_ids": np.integer, "logp_old": np.floating}
LARGEST: dict[str, np.iinfo[Any]] = {"token_ids": np.iinfo(np.int32), "action_ids": np.iinfo(np.int16)}
"""The integers that are kept: others would wrap."""
KEPT_AS = {"token_ids": np.int32, "action_ids": np.int16, "logp_old": np.float32, "logp_sampler": np.float32}
"""The types on the wire; other columns keep their own."""


def pack_tokens(batch: TokenBatch) -> bytes:
    """npz with `uid, offsets, token_ids, action_ids, logp_old` and every other column that is set."""
    names = {
        "uid": np.asarray(batch.uid, dtype=np.str_),
        "offsets": np.asarray(batch.offsets, np.int64),
    }
    columns = {name: np.asarray(column, KEPT_AS.get(name)) for name, column in batch.columns().items()}
    out = io.BytesIO()
    arrays: dict[str, Any] = names | columns  # savez's stub takes the names for its own flags
    np.savez(out, **arrays)
    return out.getvalue()


def unpack_tokens(body: bytes) -> TokenBatch:
    """The arrays of one body. Raises UserError naming the array that is missing or does not fit.

    Any trainer may add columns of its own. They are checked for their length, stored with the body, and not
    read here."""
    columns = read_arrays(body)
    if "uid" not in columns or columns["uid"].dtype.kind not in "US":
        raise UserError("token arrays: uid: expected a one-dimensional array of strings")
    for name, kind in NEEDED.items():
        if name not in columns:
            raise UserError(f"token arrays: {name}: missing; expected uid, {', '.join(NEEDED)}")
        if not np.issubdtype(columns[name].dtype, kind):
            raise UserError(
                f"token arrays: {name}: expected one dimension of {kind.__name__}, got {columns[name].dtype}"
            )
    for name, kept in LARGEST.items():
        _check_range(name, columns[name], int(kept.min), int(kept.max))
    _check_range("offsets", columns["offsets"], 0, len(columns["token_ids"]))
    uid = _strings(columns.pop("uid"))
    offsets = columns.pop("offsets").astype(np.int64)
    tokens = columns.pop("token_ids").astype(np.int32)
    if (
        len(offsets) != len(uid) + 1
        or offsets[0] != 0
        or offsets[-1] != len(tokens)
        or (np.diff(offsets) < 0).any()
    ):
        raise UserError(
            f"token arrays: offsets: expected {len(uid) + 1} rising values from 0 to {len(tokens)}"
        )
    actions = columns.pop("action_ids").astype(np.int16)
    logp = columns.pop("logp_old").astype(np.float32)
    for name, array in (("action_ids", actions), ("logp_old", logp)):
        if len(array) != len(tokens):
            raise UserError(f"token arrays: {name}: {len(array)} values for {len(tokens)} tokens")
    inside = logp[actions >= 0]
    if not np.isfinite(inside).all() or (inside > 1e-3).any():
        raise UserError("token arrays: logp_old: expected finite log-probs <= 0 on every action token")
    sampler = columns.pop("logp_sampler", None)
    if sampler is not None and (len(sampler) != len(tokens) or sampler.dtype.kind != "f"):
        raise UserError(f"token arrays: logp_sampler: expected {len(tokens)} floating numbers")
    for name, array in columns.items():
        if len(array) not in (len(uid), len(tokens)):
            raise UserError(
                f"token arrays: {name}: expected {len(uid)} values (one per trajectory) or {len(tokens)} "
                "(one per token)"
            )
    known = {name: _per_row(columns.get(name), len(uid)) for name in TokenBatch.ROW_COLUMNS}
    return TokenBatch(uid, offsets, tokens, actions, logp_sampler=sampler, logp_old=logp, **known)


def _per_row(column: np.ndarray | None, rows: int) -> np.ndarray | None:
    """A column of numbers with one value per trajectory; None for one of another form, as another trainer may
    use the same name."""
    return column if column is not None and len(column) == rows and column.dtype.kind in "bifu" else None


def _strings(array: np.ndarray) -> list[str]:
    try:
        return array.astype(np.str_).tolist()
    except ValueError as e:  # bytes that are not ASCII, or code points that no text has
        raise UserError("token arrays: uid: expected text") from e


def _check_range(name: str, array: np.ndarray, least: int, most: int) -> None:
    if len(array) and not (least <= int(array.min()) and int(array.max()) <= most):
        bad = int(array.min()) if int(array.min()) < least else int(array.max())
        raise UserError(f"token arrays: {name}: {bad}; whole numbers from {least} to {most} are accepted")
