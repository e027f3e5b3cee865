"""A worker that starts says what it waits for; without Ray."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace

from rollout_fakes import ScriptedWorker
from scripted_pool import pool_of, until

from services.contracts import WorkerInfo
from services.rollout.pool import membership, placement
from services.rollout.pool.member import Member
from services.worker_state import WorkerState
from trainer.session import waits
from trainer.session.startup import starting


async def test_a_worker_that_starts_says_what_it_waits_for(monkeypatch):
    up = asyncio.Event()
    room = asyncio.Event()
    answers = asyncio.Event()
    stages = ["importing vLLM", "loading the model into vLLM"]

    async def reserve(settings):
        await room.wait()
        return SimpleNamespace(bundle_specs=[{}])

    async def starts(method, *args):
        if method == "start":
            await up.wait()
        else:
            await answers.wait()
        waits_for = stages.pop(0) if len(stages) > 1 else stages[0]
        return WorkerInfo("w0.1", 7, "here", 0, state=WorkerState.STARTING, waits_for=waits_for)

    monkeypatch.setattr(membership, "STAGE_SECONDS", 0.01)
    monkeypatch.setattr(placement, "reserve", reserve)
    monkeypatch.setattr(placement, "create_worker", lambda *arguments: ScriptedWorker(starts))
    pool = pool_of(target=1)
    task = asyncio.create_task(pool._membership._start_member(0))
    pool._roster.starting = {0: task}
    learner = SimpleNamespace(where=[])
    monkeypatch.setattr(waits.os, "getloadavg", lambda: (1e3, 0, 0))
    monkeypatch.setattr(waits.os, "cpu_count", lambda: 2)
    end = ", the learner; load 1000 on 2 cores"
    for waits_for, event in (("room on the cluster", room), ("its process", answers)):
        await until(lambda wanted=waits_for: pool.workers()[0].waits_for == wanted)
        assert starting(pool, learner) == f"rollout worker w0.1 (starting: {waits_for}){end}"
        event.set()
    await until(lambda: pool.workers()[0].waits_for == "loading the model into vLLM")
    monkeypatch.setattr(waits.os, "getloadavg", lambda: (2.0, 0, 0))
    learner.where.append("here")
    assert starting(pool, learner) == "rollout worker w0.1 (starting: loading the model into vLLM)"
    up.set()
    await task
    assert pool._roster.members[0].info.pid == 7


async def test_an_answer_that_comes_after_the_start_does_not_take_its_place(monkeypatch):
    """As where `asyncio.wait_for` swallows the cancel: the worker would count as starting, without a pid."""
    asked = asyncio.Event()

    class Worker(ScriptedWorker):
        async def info(self, *, timeout_seconds):
            early = WorkerInfo("w0.1", 0, "here", 0, state=WorkerState.STARTING)
            self.calls += 1
            if self.calls == 1:
                return early
            asked.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
            return early

        async def start(self, *, timeout_seconds):
            await asked.wait()
            return WorkerInfo("w0.1", 7, "here", 0, state=WorkerState.READY)

    monkeypatch.setattr(membership, "STAGE_SECONDS", 0.0)
    member = Member(0, "w0.1", Worker(None), WorkerInfo("w0.1", 0, "", 0, state=WorkerState.STARTING))
    await asyncio.wait_for(pool_of(target=1)._membership._bring_up(member), 30)
    assert (member.info.pid, member.info.state) == (7, WorkerState.READY)
