"""A pool whose workers do what a test says, without Ray."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from rollout_fakes import ScriptedWorker, request

from services.contracts import WorkerInfo
from services.rollout.pool.member import Member
from services.rollout.pool.pool import RolloutPool
from services.settings import RolloutSettings, WeightSyncSettings
from services.worker_state import WorkerState


def member(slot, does, state="ready", version=0):
    """A worker that is answered for by `does(method, *args)`."""
    id = f"w{slot}.1"
    info = WorkerInfo(id, 0, "here", 0, state=WorkerState(state))
    return Member(slot, id, ScriptedWorker(does), info, state=WorkerState(state), version=version)


def pool_of(*members, target=None, **settings):
    events = []
    made = RolloutPool(
        RolloutSettings(template="lab", **settings),
        model_path="m",
        retriever_url="http://x",
        retriever_timeout_seconds=1,
        on_event=events.append,
        sync=WeightSyncSettings(backend="gloo", timeout_seconds=5),
    )
    made.events = events
    made._roster.target = len(members) if target is None else target
    made._roster.members = {m.slot: m for m in members}
    return made


def trajectory(asked):
    return SimpleNamespace(uid=asked.uid, question=asked.question, actions=(), policy_version=0)


async def samples(method, *args):
    await asyncio.sleep(0)
    return trajectory(args[0]) if method == "rollout" else None


def requests(n):
    return [request(f"u{i}", group=f"g{i}") for i in range(n)]


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)
