"""Trajectories as the stores keep them: JSON arrays without keys."""

from __future__ import annotations

import orjson

from services.likelihood.records import ActionRecord, TrajectoryRecord


def pack_actions(actions: list[ActionRecord]) -> bytes:
    return orjson.dumps([(a.tokens, a.logp_before, a.logp_after, a.documents) for a in actions])


def unpack_actions(body: bytes) -> list[ActionRecord]:
    """Not validated again: it was when it came in."""
    return [
        ActionRecord.model_construct(tokens=n, logp_before=before, logp_after=after, documents=documents)
        for n, before, after, documents in orjson.loads(body)
    ]


def unpack_trajectory(
    uid: str,
    group: str,
    reward: float | None,
    advantage: float,
    tool_rounds: int,
    actions: bytes,
    right: bool | None = None,
) -> TrajectoryRecord:
    return TrajectoryRecord.model_construct(
        uid=uid,
        group=group,
        reward=reward,
        advantage=advantage,
        right=None if right is None else bool(right),
        tool_rounds=tool_rounds,
        actions=unpack_actions(actions),
    )
