"""Which state of a rollout worker may follow which, and that nobody can go another way."""

from __future__ import annotations

import inspect
import json

import pytest
from rollout_fakes import ScriptedWorker

from services.contracts import WorkerInfo
from services.control.server import WORKER_STATES
from services.rollout.pool.member import Member
from services.rollout.pool.worker_handle import RayWorkerHandle, WorkerHandle
from services.rollout.worker.worker import RolloutWorker
from services.worker_state import TRANSITIONS, WorkerState

PAIRS = [(before, after) for before in WorkerState for after in WorkerState]
LEGAL = {
    "starting": "waiting ready failed",
    "waiting": "ready failed",
    "ready": "syncing draining failed",
    "syncing": "ready draining failed",
    "draining": "failed",
    "failed": "syncing draining",
}


@pytest.mark.parametrize(("before", "after"), PAIRS, ids=[f"{a}-{b}" for a, b in PAIRS])
def test_a_worker_goes_by_the_table_alone(before, after):
    member = Member(0, "w0.1", ScriptedWorker(None), WorkerInfo("w0.1", 1, "n", 0), state=before)
    if after is before or after in LEGAL[before].split():
        member.become(after)
        assert member.state is after
    else:
        with pytest.raises(RuntimeError, match=f"cannot go from {before} to {after}"):
            member.become(after)
        assert member.state is before


def test_every_state_is_in_the_table_and_can_be_reached_from_the_first():
    assert set(TRANSITIONS) == set(WorkerState)
    reached = {WorkerState.STARTING}
    for _ in WorkerState:
        reached |= {after for before in reached for after in TRANSITIONS[before]}
    assert reached == set(WorkerState)


def test_others_see_the_states_as_plain_words():
    assert [f"{state}" for state in WorkerState] == list(LEGAL) == list(WORKER_STATES)
    assert json.dumps(WorkerState.READY) == '"ready"' and WorkerState.READY == "ready"


def methods(kind):
    """Parameters of the public methods by name, without those that Ray adds to a class once it is remote."""
    functions = inspect.getmembers(kind, inspect.isfunction)
    return {
        name: [p for p in inspect.signature(function).parameters if not p.startswith("_ray")]
        for name, function in functions
        if not name.startswith("_")
    }


def test_handle_fake_and_worker_have_the_same_methods():
    asked = methods(WorkerHandle)
    assert methods(RayWorkerHandle) == asked == methods(ScriptedWorker)
    worker = methods(RolloutWorker)
    for name in asked.keys() - {"kill"}:  # which ends the worker's process from outside
        parameters = [p for p in asked[name] if p != "timeout_seconds"]
        assert len(worker[name]) == len(parameters), name
