"""The states of a rollout worker, and which may follow which.

    starting -> waiting -> ready <-> syncing        waiting: the engine runs, and holds no weights of the
        |          |         |          |           current version yet
        |          |         +-> draining <-+
        +----------+---- failed <-----------+       failed: no whole version of the weights, dead, or closed

A worker and its pool each keep a state by this table. The pool alone uses `waiting` and `draining`, because
only the pool knows whether weights are on their way and whether a worker is still wanted.
"""

from __future__ import annotations

from enum import StrEnum


class WorkerState(StrEnum):
    """The values are those of the REST interface, the metrics and the event log."""

    STARTING = "starting"
    WAITING = "waiting"
    READY = "ready"
    SYNCING = "syncing"
    DRAINING = "draining"
    FAILED = "failed"

    def to(self, state: WorkerState) -> WorkerState:
        """`state`, if it may follow this one or is this one. Raises RuntimeError otherwise."""
        if state is not self and state not in TRANSITIONS[self]:
            raise RuntimeError(f"a rollout worker cannot go from {self} to {state}")
        return state


TRANSITIONS: dict[WorkerState, frozenset[WorkerState]] = {
    WorkerState.STARTING: frozenset({WorkerState.WAITING, WorkerState.READY, WorkerState.FAILED}),
    WorkerState.WAITING: frozenset({WorkerState.READY, WorkerState.FAILED}),
    WorkerState.READY: frozenset({WorkerState.SYNCING, WorkerState.DRAINING, WorkerState.FAILED}),
    WorkerState.SYNCING: frozenset({WorkerState.READY, WorkerState.DRAINING, WorkerState.FAILED}),
    # A drained worker is never taken back: a new one starts in its place.
    WorkerState.DRAINING: frozenset({WorkerState.FAILED}),
    # Half-written weights: the next whole version makes the worker ready, by way of `syncing`.
    WorkerState.FAILED: frozenset({WorkerState.SYNCING, WorkerState.DRAINING}),
}
