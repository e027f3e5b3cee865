"""`scale` and `close` while the first workers of a pool start; without Ray."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from rollout_fakes import ScriptedWorker
from scripted_pool import pool_of, until

from services.common.errors import EnvironmentLacks
from services.contracts import WorkerInfo
from services.rollout.pool import placement


class Cluster:
    """Has as many rooms as are given to it; a worker that it is asked for is up at once. Who is the nth to
    ask, for an n of `barred`, gets no room."""

    def __init__(self, monkeypatch, barred=()):
        self.rooms = asyncio.Semaphore(0)
        self.barred = barred
        self.asked = 0
        self.workers = []
        monkeypatch.setattr(placement, "reserve", self.reserve)
        monkeypatch.setattr(placement, "create_worker", self.create_worker)
        monkeypatch.setattr(placement.ray, "cluster_resources", lambda: {"GPU": 4.0})

    async def reserve(self, settings):
        self.asked += 1
        if self.asked - 1 in self.barred:
            await asyncio.Event().wait()
        await self.rooms.acquire()
        return SimpleNamespace(bundle_specs=[{"GPU": 0.6}])

    def create_worker(self, *arguments):
        async def answers(method, *args):
            return WorkerInfo("w", 1, "here", 0, state="ready")

        self.workers.append(ScriptedWorker(answers))
        return self.workers[-1]

    def give(self, n):
        for _ in range(n):
            self.rooms.release()


@pytest.mark.parametrize("n", [1, 4], ids=["fewer", "more"])
@pytest.mark.parametrize("placed", [0, 1], ids=["none has room", "one has room"])
async def test_what_loads_beside_the_workers_begins_though_another_number_is_wanted_meanwhile(
    monkeypatch, n, placed
):
    cluster = Cluster(monkeypatch)
    loaded = []

    async def load():
        loaded.append(len(cluster.workers))

    pool = pool_of(workers=2)
    start = asyncio.create_task(pool.start(beside=load))
    try:
        await until(lambda: cluster.asked == 2)
        cluster.give(placed)
        await until(lambda: len(pool._roster.members) == placed)
        await pool.scale(n)
        assert not start.done()
        cluster.give(4 - placed)
        await asyncio.wait_for(start, 60)
        assert len(loaded) == 1, "the learner's part began, and once"
        await until(lambda: [w.state for w in pool.workers()] == ["ready"] * n)
        assert pool.target == n and sorted(pool._roster.members) == list(range(n))
        assert len(cluster.workers) == n, "no slot got two workers"
    finally:
        await pool.close()


@pytest.mark.parametrize("slot", [0, 1])
async def test_the_worker_that_is_up_is_kept_whichever_slot_has_room(monkeypatch, slot):
    cluster = Cluster(monkeypatch, barred={1 - slot})
    loaded = asyncio.Event()

    async def load():
        loaded.set()

    pool = pool_of(workers=2)
    start = asyncio.create_task(pool.start(beside=load))
    try:
        await until(lambda: cluster.asked == 2)
        cluster.give(1)
        await until(lambda: slot in pool._roster.members)
        (up,) = pool._roster.all()
        await pool.scale(1)
        await asyncio.wait_for(start, 60)
        assert loaded.is_set() and pool.target == 1
        assert pool._roster.members == {0: up} and not pool._roster.starting
        assert up.state == "ready" and not up.worker.killed
        assert up.id == f"w{slot}.1" and len(pool.workers()) == 1 and cluster.asked == 2
    finally:
        await pool.close()


async def test_a_worker_that_comes_up_though_given_up_does_not_replace_the_one_in_its_slot(monkeypatch):
    cluster = Cluster(monkeypatch)
    cancelled = asyncio.Event()

    async def late(method, *args):
        if method == "start":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()  # as `wait_for` may, where the answer comes at the same moment
        return WorkerInfo("w", 1, "here", 0, state="ready")

    pool = pool_of(workers=2)
    start = asyncio.create_task(pool.start())
    try:
        await until(lambda: cluster.asked == 2)
        create = cluster.create_worker
        slow = ScriptedWorker(late)
        monkeypatch.setattr(placement, "create_worker", lambda id, *a: slow if id == "w0.1" else create())
        cluster.give(2)
        await until(lambda: 1 in pool._roster.members)
        (up,) = pool._roster.all()
        await pool.scale(1)
        await asyncio.wait_for(start, 60)
        assert cancelled.is_set() and slow.killed
        assert pool._roster.members == {0: up} and not up.worker.killed
    finally:
        await pool.close()


async def test_a_start_that_fails_after_scale_leaves_no_worker(monkeypatch):
    cluster = Cluster(monkeypatch)

    async def load():
        raise EnvironmentLacks("the learner has no room")

    pool = pool_of(workers=1)
    start = asyncio.create_task(pool.start(beside=load))
    await until(lambda: cluster.asked == 1)
    await pool.scale(2)
    await until(lambda: cluster.asked == 2)
    cluster.give(1)
    with pytest.raises(EnvironmentLacks, match="the learner has no room"):
        await asyncio.wait_for(start, 60)
    assert pool.workers() == [] and not pool._roster.starting
    assert all(worker.killed for worker in cluster.workers)


@pytest.mark.parametrize("begun", [False, True], ids=["not begun", "begun"])
@pytest.mark.parametrize("with_learner", [False, True], ids=["workers", "workers and learner"])
async def test_a_start_ends_with_an_error_where_the_pool_is_closed_meanwhile(
    monkeypatch, with_learner, begun
):
    cluster = Cluster(monkeypatch)
    loading = asyncio.Event()

    async def load():
        loading.set()
        await asyncio.Event().wait()

    pool = pool_of(workers=2)
    before = asyncio.all_tasks()
    start = asyncio.create_task(pool.start(beside=load if with_learner else None))
    await until(lambda: cluster.asked == 2)
    if begun:
        cluster.give(2 if with_learner else 1)
        await until(lambda: loading.is_set() if with_learner else len(pool._roster.members) == 1)
    await pool.close()
    with pytest.raises(EnvironmentLacks, match=r"^the rollout pool was closed$"):
        await asyncio.wait_for(start, 60)
    assert asyncio.all_tasks() == before, "nothing watches a closed pool"
    assert loading.is_set() == (with_learner and begun)
    assert pool.workers() == [] and all(worker.killed for worker in cluster.workers)
