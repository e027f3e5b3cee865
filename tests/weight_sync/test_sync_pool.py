"""Weight sync by group broadcast on a local Ray: real workers, real gloo, workers that join, die and hang on
the way."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
import ray
from places import PYTHONPATH
from pool_world import difference, events_of, in_state, until
from rollout_fakes import request
from rollout_search import search_server
from sync_actors import FailingWorker
from sync_world import LocalLearner, change, pool, sync, wide_model

from services.contracts import WeightsReceiver
from services.rollout.errors import WorkerUnavailableError
from services.rollout.pool import delivery, membership, placement
from services.rollout.pool.worker_handle import RayWorkerHandle
from services.settings import WeightSyncSettings
from services.weight_sync import GroupMismatchError, WeightSyncError
from trainer.loop.update.sync import run_with_resync

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.ray]


@pytest.fixture(scope="module")
def cluster():
    paths = PYTHONPATH
    environment = {"PYTHONPATH": paths}
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": environment},
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    path = tmp_path_factory.mktemp("policy") / "m"
    return SimpleNamespace(path=path, model=wide_model(path))


TIMEOUT = 6.0


@pytest.fixture(scope="module")
async def world(cluster, tmp_path_factory):
    """A pool of two workers that all tests share, with shorter waits; a learner; and the version that is in
    force."""
    path = tmp_path_factory.mktemp("policy") / "m"
    model = wide_model(path)
    with pytest.MonkeyPatch.context() as patch, search_server() as search:
        patch.setattr(membership, "HEARTBEAT_SECONDS", 0.2)
        patch.setattr(membership, "FIRST_BACK_OFF_SECONDS", 0.1)
        patch.setattr(delivery, "SLACK_SECONDS", 2.0)
        patch.setattr(placement, "RolloutWorker", FailingWorker)
        settings = WeightSyncSettings(backend="gloo", timeout_seconds=TIMEOUT, bucket_mib=1)
        async with pool(path, workers=2, retriever_url=search.url, timeout=TIMEOUT) as p:
            await p.start()
            yield SimpleNamespace(
                path=path, model=model, pool=p, learner=LocalLearner(model, settings), version=0
            )


async def next_version(world) -> float:
    """Change the learner's weights and sync them; seconds."""
    world.version += 1
    change(world.model, world.version)
    return await sync(world.learner, world.pool, world.version)


async def ready(world, count: int) -> list[str]:
    """Wait for so many workers, and check that all hold the learner's weights, by log-probs over their own
    RPC."""
    p = world.pool
    await until(lambda: len(in_state(p, "ready")) == count == len(p.workers()))
    for worker in p.workers():
        assert worker.policy_version == world.version
        assert await difference(p, worker.id, world.model) < 1e-4
    return [w.id for w in p.workers()]


def at_tensor(world, number, action):
    """Do something once, in the middle of a broadcast."""

    def hook(i):
        if i == number:
            world.learner.hook = lambda i: None
            action()

    world.learner.hook = hook


def victim_of(world) -> str:
    """The worker that comes second."""
    return world.pool.workers()[1].id


def pid_of(world, worker: str) -> int:
    return world.pool._roster.get(worker).info.pid


async def test_one_group_serves_while_the_members_stay_with_few_calls(world, monkeypatch):
    p, learner, calls = world.pool, world.learner, []
    answer = RayWorkerHandle._answer

    async def counted(self, ref, timeout_seconds):
        calls.append(self.id)
        return await answer(self, ref, timeout_seconds)

    async def ping(self, *, timeout_seconds):
        return await answer(self, self.actor.info.remote(), timeout_seconds)

    monkeypatch.setattr(RayWorkerHandle, "_answer", counted)
    monkeypatch.setattr(RayWorkerHandle, "info", ping)
    for _ in range(2):
        calls.clear()
        await next_version(world)
        for worker in p.workers():
            assert calls.count(worker.id) <= 4
            assert await difference(p, worker.id, world.model, 0.6) < 1e-4
        await ready(world, 2)
    first, second = learner.offers
    assert first.epoch == second.epoch and second.weights is None


async def test_versions_never_go_back(world):
    with pytest.raises(WeightSyncError, match=r"version 1 is not newer than 2: versions only go up"):
        await sync(world.learner, world.pool, 1)
    old = world.learner.offer_weights(1, [WeightsReceiver("w0.1")])
    with pytest.raises(WeightSyncError, match="holds version 2 and was sent 1"):
        await world.pool._roster.get("w0.1").worker.update_weights(old, timeout_seconds=20)


async def test_pings_are_answered_in_mid_sync(world):
    held = threading.Event()
    at_tensor(world, 12, lambda: held.wait(60))
    syncing = asyncio.create_task(next_version(world))
    await until(lambda: len(in_state(world.pool, "syncing")) == 2)
    await asyncio.sleep(0.3)
    info = await world.pool._roster.get("w0.1").worker.info(timeout_seconds=20)
    assert (info.state, info.policy_version) == ("syncing", 2)
    held.set()
    await syncing
    await ready(world, 2)


async def test_a_joiner_takes_the_weights_from_a_peer_that_samples_on(world):
    p, learner = world.pool, world.learner
    batch = asyncio.create_task(p.rollout([request(f"u{i}", group=f"g{i}", seed=i) for i in range(30)]))
    offers, epoch = len(learner.offers), learner.offers[-1].epoch
    await p.scale(3)
    assert await ready(world, 3) == ["w0.1", "w1.1", "w2.1"]
    assert len(learner.offers) == offers
    [lent] = events_of(p, "weights_lent")
    assert lent["worker"] == "w2.1" and lent["lender"] in ("w0.1", "w1.1") and lent["version"] == 3
    assert {t.policy_version for t in await batch} == {3} and not events_of(p, "trajectory_retry")
    await next_version(world)
    assert learner.offers[-1].epoch != epoch and len(learner.offers[-1].ranks) == 3
    await ready(world, 3)
    assert not events_of(p, "sync_failed")
    await p.scale(2)
    await next_version(world)
    await ready(world, 2)


async def test_other_variables_are_an_error_within_seconds_on_both_sides(world, monkeypatch):
    kept = world.learner.source
    world.learner.source = LocalLearner(world.model, kept._settings).source
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    began = time.monotonic()
    world.pool.events.clear()
    with pytest.raises(GroupMismatchError) as e:
        await sync(world.learner, world.pool, world.version + 1)
    assert time.monotonic() - began < TIMEOUT
    said = (
        "NCCL_CUMEM_ENABLE is not set on worker w0.1 and '1' on learner rank 0: "
        "set it to the same value for both"
    )
    assert str(e.value) == said
    assert [said in e["reason"] for e in events_of(world.pool, "sync_failed")] == [True, True]
    world.pool.events.clear()
    monkeypatch.delenv("NCCL_CUMEM_ENABLE")
    await sync(
        world.learner, world.pool, world.version
    )  # nobody needs it: the old version is in force, whole
    await next_version(world)
    await ready(world, 2)


async def test_a_worker_killed_in_mid_broadcast_costs_no_more_than_itself(world):
    p, learner, victim = world.pool, world.learner, victim_of(world)
    pid, offers = pid_of(world, victim), len(learner.offers)
    at_tensor(world, 14, lambda: os.kill(pid, signal.SIGKILL))
    assert await next_version(world) < TIMEOUT, "noticed at once, not by the timeout"
    assert len(learner.offers) == offers + 2 and victim not in learner.offers[-1].ranks
    [survivor] = [m.id for m in p._roster.serving()]
    assert await difference(p, survivor, world.model) < 1e-4
    assert [e["worker"] for e in events_of(p, "worker_lost")] == [victim]
    assert [(e["version"], e["attempt"]) for e in events_of(p, "weights_sent_again")] == [(world.version, 1)]
    await ready(world, 2)
    assert events_of(p, "weights_lent")[-1]["lender"] == survivor
    assert not psutil.pid_exists(pid)


async def test_a_half_written_worker_gets_no_trajectory_before_it_holds_a_whole_version(world, monkeypatch):
    p, offer, offers, go_on = world.pool, world.learner.offer_weights, [], threading.Event()

    def offer_late(version, receivers):
        offers.append(version)
        assert len(offers) < 2 or go_on.wait(60)
        return offer(version, receivers)

    monkeypatch.setattr(world.learner, "offer_weights", offer_late)
    pid = pid_of(world, victim_of(world))
    at_tensor(world, 14, lambda: os.kill(pid, signal.SIGKILL))
    under_way = asyncio.create_task(p.rollout([request(f"k{i}", group=f"k{i}", seed=i) for i in range(60)]))
    syncing = asyncio.create_task(next_version(world))
    await until(lambda: len(offers) == 2)
    [survivor] = in_state(p, "failed")
    batch = asyncio.create_task(p.rollout([request(f"h{i}", group=f"h{i}", seed=i) for i in range(8)]))
    await asyncio.sleep(0.5)
    assert not p._roster.get(survivor.id).jobs and not batch.done()
    with pytest.raises(WorkerUnavailableError, match="holds no whole version"):
        await p.logprobs(survivor.id, [[1, 2, 3]], 1.0)
    go_on.set()
    await syncing
    assert {t.policy_version for t in await batch} == {world.version}
    assert {t.policy_version for t in await under_way} <= {world.version - 1, world.version}
    await ready(world, 2)


async def test_a_worker_that_hangs_in_mid_broadcast_is_found_out_by_the_timeout(world):
    p, victim = world.pool, victim_of(world)
    pid = pid_of(world, victim)
    at_tensor(world, 14, lambda: os.kill(pid, signal.SIGSTOP))
    p.events.clear()
    assert await next_version(world) < 2 * TIMEOUT + 2
    assert f"{victim} did not take version {world.version} within weight_sync.timeout_seconds=6" in str(
        events_of(p, "worker_lost")[0]["reason"]
    )
    [survivor] = p._roster.serving()
    assert await difference(p, survivor.id, world.model) < 1e-4
    await ready(world, 2)


async def test_a_worker_that_raises_in_a_sync_is_replaced_and_the_next_sync_works(world):
    p, victim = world.pool, victim_of(world)
    (world.path / f"fail-{victim}").touch()
    p.events.clear()
    assert await next_version(world) < TIMEOUT
    assert "were not loaded whole: out of memory" in str(events_of(p, "sync_failed"))
    assert [e["worker"] for e in events_of(p, "worker_lost")] == [victim]
    assert await difference(p, p._roster.serving()[0].id, world.model) < 1e-4
    await next_version(world)
    await ready(world, 2)


async def test_a_joiner_that_hangs_is_replaced_and_its_lender_serves_on(world, monkeypatch):
    p, lend, stopped = world.pool, delivery.Delivery._lend, []

    async def stop_first(self, member, *lending):
        if not stopped:
            stopped.append(member.info.pid)
            os.kill(member.info.pid, signal.SIGSTOP)
        return await lend(self, member, *lending)

    monkeypatch.setattr(delivery.Delivery, "_lend", stop_first)
    p.events.clear()
    await p.scale(3)
    await until(lambda: stopped)
    began = time.monotonic()
    for member in p._roster.serving():
        assert await difference(p, member.id, world.model) < 1e-4
    assert time.monotonic() - began < TIMEOUT
    await until(lambda: events_of(p, "worker_start_failed"), 2 * TIMEOUT + 2)
    said = f"did not take version {world.version} within weight_sync.timeout_seconds=6"
    assert said in events_of(p, "worker_start_failed")[0]["reason"]
    await ready(world, 3)
    assert not psutil.pid_exists(stopped[0]) and not events_of(p, "worker_lost")
    await p.scale(2)


async def test_where_nobody_holds_the_weights_the_learner_is_asked_again(world):
    p = world.pool
    await p.scale(1)
    await ready(world, 1)
    # The only worker dies in mid-broadcast: nobody is left to be sent the version again. That does not end
    # the run.
    pid = p.workers()[0].pid
    at_tensor(world, 14, lambda: os.kill(pid, signal.SIGKILL))
    await next_version(world)
    assert not p._roster.serving()
    requests = [request(f"n{i}", group=f"n{i}", seed=i) for i in range(4)]
    again = lambda: sync(world.learner, p, world.version)  # noqa: E731
    done = await asyncio.wait_for(run_with_resync(p, p.rollout(requests), again), 90)
    assert {t.policy_version for t in done} == {world.version}
    [worker] = await ready(world, 1)
    assert {t.worker for t in done} == {worker} and not p.wants_weights
