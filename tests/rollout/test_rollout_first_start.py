"""`scale` while the first workers of a pool start; without Ray."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from rollout_fakes import ScriptedWorker
from test_rollout_membership import pool_of, until

from services.common.errors import EnvironmentLacks
from services.contracts import WorkerInfo
from services.rollout.pool import placement


class Cluster:
    """Has as many rooms as are given to it; a worker that it is asked for is up at once."""

    def __init__(self, monkeypatch):
        self.rooms = asyncio.Semaphore(0)
        self.asked = 0
        self.workers = []
        monkeypatch.setattr(placement, "reserve", self.reserve)
        monkeypatch.setattr(placement, "create_worker", self.create_worker)
        monkeypatch.setattr(placement.ray, "cluster_resources", lambda: {"GPU": 4.0})

    async def reserve(self, settings):
        self.asked += 1
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
        await asyncio.wait_for(start, 10)
        assert len(loaded) == 1, "the learner's part began, and once"
        await until(lambda: [w.state for w in pool.workers()] == ["ready"] * n)
        assert pool.target == n and sorted(pool._roster.members) == list(range(n))
        assert len(cluster.workers) == n, "no slot got two workers"
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
        await asyncio.wait_for(start, 10)
    assert pool.workers() == [] and not pool._roster.starting
    assert all(worker.killed for worker in cluster.workers)
