"""Token arrays on the wire: one npz body for the trajectories of a step."""

from __future__ import annotations

import io
import zipfile

import numpy as np

from services.contracts import TokenBatch
from services.likelihood.records import LikelihoodError

NEEDED = {"offsets": np.integer, "token_ids": np.integer, "action_ids": np.integer, "logp_old": np.floating}
MAX_UNPACKED = 1 << 30
"""Most bytes that a body may unpack to."""


def pack_tokens(batch: TokenBatch) -> bytes:
    """npz with `uid, offsets, token_ids, action_ids, logp_old` and, where present, `logp_sampler` and the extra columns."""
    columns = {
        "uid": np.asarray(batch.uid, dtype=np.str_),
        "offsets": np.asarray(batch.offsets, np.int64),
        "token_ids": np.asarray(batch.token_ids, np.int32),
        "action_ids": np.asarray(batch.action_ids, np.int16),
    }
    for name in ("logp_old", "logp_sampler"):
        if getattr(batch, name) is not None:
            columns[name] = np.asarray(getattr(batch, name), np.float32)
    out = io.BytesIO()
    np.savez(out, **columns, **batch.extra)
    return out.getvalue()


def unpack_tokens(body: bytes) -> TokenBatch:
    """The arrays of one body. Raises LikelihoodError naming the array that is missing or does not fit."""
    try:
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > MAX_UNPACKED:
            raise LikelihoodError(
                f"token arrays: {size} bytes when unpacked; at most {MAX_UNPACKED} accepted"
            )
        with np.load(io.BytesIO(body), allow_pickle=False) as archive:
            columns = {name: archive[name] for name in archive.files}
    except (zipfile.BadZipFile, ValueError, EOFError, OSError, KeyError) as e:
        raise LikelihoodError("token arrays: expected an npz body (numpy.savez, no pickled objects)") from e
    if "uid" not in columns or columns["uid"].ndim != 1 or columns["uid"].dtype.kind not in "US":
        raise LikelihoodError("token arrays: uid: expected a one-dimensional array of strings")
    for name, kind in NEEDED.items():
        if name not in columns:
            raise LikelihoodError(f"token arrays: {name}: missing; expected uid, {', '.join(NEEDED)}")
        if columns[name].ndim != 1 or not np.issubdtype(columns[name].dtype, kind):
            raise LikelihoodError(
                f"token arrays: {name}: expected one dimension of {kind.__name__}, got {columns[name].dtype}"
            )
    uid = [str(u) for u in columns.pop("uid")]
    offsets, tokens = columns.pop("offsets").astype(np.int64), columns.pop("token_ids").astype(np.int32)
    if (
        len(offsets) != len(uid) + 1
        or offsets[0] != 0
        or offsets[-1] != len(tokens)
        or (np.diff(offsets) < 0).any()
    ):
        raise LikelihoodError(
            f"token arrays: offsets: expected {len(uid) + 1} rising values from 0 to {len(tokens)}"
        )
    actions, logp = columns.pop("action_ids").astype(np.int16), columns.pop("logp_old").astype(np.float32)
    for name, array in (("action_ids", actions), ("logp_old", logp)):
        if len(array) != len(tokens):
            raise LikelihoodError(f"token arrays: {name}: {len(array)} values for {len(tokens)} tokens")
    inside = logp[actions >= 0]
    if not np.isfinite(inside).all() or (inside > 1e-3).any():
        raise LikelihoodError("token arrays: logp_old: expected finite log-probs <= 0 on every action token")
    sampler = columns.pop("logp_sampler", None)
    for name, array in columns.items():
        if array.ndim != 1 or len(array) not in (len(uid), len(tokens)):
            raise LikelihoodError(
                f"token arrays: {name}: expected {len(uid)} values (one a trajectory) or {len(tokens)} (one a token)"
            )
    return TokenBatch(uid, offsets, tokens, actions, logp_sampler=sampler, logp_old=logp, extra=columns)
