"""Values as they stand in Redis: trajectories in JSON, chunks of curves as bits."""

from __future__ import annotations

import numpy as np
import orjson

from services.likelihood.records import TrajectoryRecord
from services.likelihood.store import series
from services.likelihood.store.action_arrays import pack_actions, unpack_trajectory

NAN_BITS = np.float64(np.nan).view(np.uint64)


def pack(t: TrajectoryRecord) -> bytes:
    fields = [t.group, t.reward, t.advantage, t.tool_rounds, pack_actions(t.actions).decode(), t.right]
    return orjson.dumps(fields)


def unpack(uid: bytes, body: bytes) -> TrajectoryRecord:
    return unpack_trajectory(uid.decode(), *orjson.loads(body))


def decoded(chunk: bytes) -> bytes:
    """A stored chunk as series.dense reads it; Redis holds no more of it than was written."""
    bits = np.zeros(series.CHUNK, np.uint64)
    bits[: len(chunk) // 8] = np.frombuffer(chunk, np.uint64)
    return (bits ^ NAN_BITS).view(np.float64).tobytes()
