"""The pool on a local Ray: real actors, real engines, real HTTP searches. The policy searches once, then
answers."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import asynccontextmanager
from types import SimpleNamespace

import psutil
import pytest
import ray
from pool_world import cluster, difference, events_of, in_state, policy, pool, requests, until  # noqa: F401
from rollout_models import searcher
from rollout_search import search_server

from retriever_service.client import RetrieverUnavailable
from services.common.errors import EnvironmentLacks, UserError
from services.contracts import WeightUpdate
from services.rollout.pool import membership, placement
from services.settings import WeightSyncSettings
from services.weight_sync import WeightSyncError, make_publisher

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.ray]


@pytest.fixture(scope="module")
def search():
    with search_server() as server:
        yield server


@pytest.fixture(autouse=True)
def fresh_search(search):
    search.reset()


def published(policy, version, **kwargs):
    model = searcher(policy.tmp / f"v{version}-{time.monotonic_ns()}", seed=version, **kwargs)
    return model, make_publisher(WeightSyncSettings(bucket_mib=1)).publish(model.named_parameters(), version)


@asynccontextmanager
async def searching(search, n):
    """Searches are held; on leaving, `n` trajectories wait for theirs."""
    search.reset()
    search.hold = True
    yield
    await until(lambda: len(search.queries) >= n)


def children(pid):
    return psutil.Process(pid).children(recursive=True)


@pytest.mark.vllm
@pytest.mark.timeout(900)  # imports of vLLM in four processes: long on a busy machine
async def test_a_pool_of_vllm_workers(cluster, policy, search):
    """One pool, its whole life: asynchronous trajectories, new weights, a worker killed in mid-batch, the
    end."""
    async with pool(policy.path, search.url, engine="vllm", workers=2) as p:
        await p.start()
        assert [(w.id, w.policy_version, w.state) for w in p.workers()] == [
            ("w0.1", 0, "ready"),
            ("w1.1", 0, "ready"),
        ]
        await p.rollout(requests("warm", 10))

        # One search that takes 5 s and more delays no other trajectory.
        search.reset()
        search.hold_first, seen, started = True, [], time.monotonic()
        batch = asyncio.create_task(p.rollout(requests("slow", 40), on_done=lambda t: seen.append(t.uid)))
        await until(lambda: len(seen) == 39)
        await asyncio.sleep(max(0.0, 5 - (time.monotonic() - started)))
        assert len(seen) == 39 and not batch.done()
        search.hold_first = False
        done = await batch
        assert [t.uid for t in done] == [r.uid for r in requests("slow", 40)]
        assert all(t.finish == "answer" and t.searches == 1 for t in done)
        groups = {t.group: {u.worker for u in done if u.group == t.group} for t in done}
        assert all(len(workers) == 1 for workers in groups.values()), (
            "samples of a group share a prefix cache"
        )
        assert {t.worker for t in done} == {"w0.1", "w1.1"}

        # New weights: proven by log-probs asked of each worker.
        model, update = published(policy, 1, again=0.5)
        before = [m.worker.calls for m in p._roster.all()]
        await p.sync(update)
        assert max(m.worker.calls - b for m, b in zip(p._roster.all(), before, strict=True)) <= 4
        for worker in p.workers():
            assert worker.policy_version == 1
            assert await difference(p, worker.id, policy.model) > 0.1
            assert await difference(p, worker.id, model) < 1e-4
            assert await difference(p, worker.id, model, 0.6) < 1e-4
        done = await p.rollout(requests("new", 40))
        assert {a.policy_version for t in done for a in t.actions} == {1}
        assert {t.searches for t in done} == {1, 2}

        # A worker is killed in mid-batch: the batch completes, each uid once; its engine does not outlive it.
        victim, engines = p.workers()[0], children(p.workers()[0].pid)
        assert engines
        seen = []
        async with searching(search, 40):
            batch = asyncio.create_task(p.rollout(requests("kill", 40), on_done=lambda t: seen.append(t.uid)))
        os.kill(victim.pid, signal.SIGKILL)
        search.hold = False
        done = await batch
        assert sorted(seen) == [t.uid for t in done] == [r.uid for r in requests("kill", 40)]
        lost = {e["uid"] for e in events_of(p, "trajectory_retry")}
        assert lost and {t.worker for t in done if t.uid in lost} == {"w1.1"}
        assert [e["worker"] for e in events_of(p, "worker_lost")] == ["w0.1"]
        assert not psutil.wait_procs(engines, timeout=60)[1], "an engine outlives its worker"
        assert not psutil.pid_exists(victim.pid)

        # The engine of the other dies under its living worker: the next ping finds out, and the worker goes.
        survivor = psutil.Process(p._roster.get("w1.1").info.pid)
        processes = [survivor, *survivor.children(recursive=True)]
        for engine in processes[1:]:
            engine.kill()
        await until(lambda: [e["worker"] for e in events_of(p, "worker_lost")] == ["w0.1", "w1.1"])
        assert "engine process is dead" in events_of(p, "worker_lost")[1]["reason"]

        await p.close()
        await p.close()
        assert not psutil.wait_procs(processes, timeout=60)[1]
        assert p.workers() == []
        with pytest.raises(EnvironmentLacks, match="closed"):
            await p.rollout(requests("late", 2))


@pytest.fixture(scope="module")
def quick():
    """Shorter waits, where the tests let something go wrong."""
    saved = {
        n: getattr(membership, n)
        for n in ("HEARTBEAT_SECONDS", "SILENCE_SECONDS", "FIRST_BACK_OFF_SECONDS", "CRASHES")
    }
    (
        membership.HEARTBEAT_SECONDS,
        membership.SILENCE_SECONDS,
        membership.FIRST_BACK_OFF_SECONDS,
        membership.CRASHES,
    ) = (
        0.2,
        6.0,
        0.1,
        2,
    )
    yield
    for name, value in saved.items():
        setattr(membership, name, value)


async def test_weights_that_are_not_the_models_are_refused_and_the_old_ones_serve_on(
    cluster, quick, policy, search
):
    async with pool(policy.path, search.url) as p:
        await p.start()
        model, good = published(policy, 3)
        publisher = make_publisher(WeightSyncSettings(bucket_mib=1))
        tensors = dict(model.named_parameters())
        wrong = {
            "missing lm_head.weight": {k: v for k, v in tensors.items() if k != "lm_head.weight"},
            "unknown extra.weight": tensors | {"extra.weight": tensors["lm_head.weight"]},
            r"model.norm.weight has shape \[95\], the model has \[96\]": tensors
            | {"model.norm.weight": tensors["model.norm.weight"][:95]},
        }
        for message, given in wrong.items():
            with pytest.raises(WeightSyncError, match=message):
                await p.sync(publisher.publish(iter(given.items()), 3))
        bucket = good.payload[0]
        damaged = type(bucket)(bucket.ref, bucket.nbytes, bucket.checksum ^ 1, bucket.tensors)
        with pytest.raises(WeightSyncError, match="arrived damaged"):
            await p.sync(WeightUpdate(3, good.backend, (damaged, *good.payload[1:]), good.nbytes))
        assert len(events_of(p, "sync_failed")) == 4
        done = await p.rollout(requests("old", 4))
        assert {t.policy_version for t in done} == {0}
        await p.sync(good)
        assert await difference(p, "w0.1", model) < 1e-4
        for version in (2, 3):
            with pytest.raises(WeightSyncError, match="versions only go up"):
                await p.sync(published(policy, version)[1])
        assert {t.policy_version for t in await p.rollout(requests("new", 4))} == {3}
        assert not events_of(p, "worker_lost")

        # The retriever is down for a while: rollouts wait, and no empty observation is made of it.
        search.reset()
        search.down = True
        batch = asyncio.create_task(p.rollout(requests("outage", 6)))
        await until(lambda: len(search.queries) >= 12)
        assert not batch.done()
        search.down = False
        assert all(a.document_ids for t in await batch for a in t.actions if a.kind == "search")

        # Weights arrive while trajectories run: each action keeps the version that made it.
        async with searching(search, 6):
            batch = asyncio.create_task(p.rollout(requests("during", 6)))
        model, update = published(policy, 4)
        await p.sync(update)
        search.hold = False
        assert {tuple(a.policy_version for a in t.actions) for t in await batch} == {(3, 4)}


async def test_a_retriever_that_stays_down_is_an_error_in_the_end(
    cluster, quick, policy, search, monkeypatch
):
    monkeypatch.setattr("services.rollout.pool.membership.FIRST_BACK_OFF_SECONDS", 0.1)
    async with pool(policy.path, search.url, retriever_timeout=0.5) as p:
        await p.start()
        search.down = True
        with pytest.raises(RetrieverUnavailable, match=r"no answer within 0\.5 s"):
            await p.rollout(requests("down", 2))
        assert len(events_of(p, "trajectory_retry")) >= 5
        search.down = False
        assert len(await p.rollout(requests("up", 2))) == 2


async def test_workers_come_and_go_during_a_run(cluster, quick, policy, search, monkeypatch):
    async with pool(policy.path, search.url, workers="all") as p:
        await p.start()
        model, update = published(policy, 1)
        await p.sync(update)
        # A node joins, so that "all" are two.
        monkeypatch.setattr(placement, "count", lambda settings, supply, learner_gpus: 2)
        await until(lambda: [w.state for w in p.workers()] == ["ready", "starting"])
        await until(lambda: len(in_state(p, "ready")) == 2)
        assert await difference(p, "w1.1", model) < 1e-4
        async with searching(search, 10):
            batch = asyncio.create_task(p.rollout(requests("drain", 10)))
        draining = asyncio.create_task(p.drain("w0.1"))
        await asyncio.sleep(0.1)
        assert {w.id: w.state for w in p.workers()} == {"w0.1": "draining", "w1.1": "ready"}
        search.hold = False
        assert {t.worker for t in await batch} == {"w0.1", "w1.1"}
        await draining
        assert [w.id for w in p.workers()] == ["w1.1"]
        assert not events_of(p, "trajectory_retry"), "a worker that leaves finishes what it runs"
        with pytest.raises(KeyError, match=r"no rollout worker w0.1; there are w1.1"):
            await p.drain("w0.1")
        assert {t.worker for t in await p.rollout(requests("after", 4))} == {"w1.1"}

        async with searching(search, 4):
            batch = asyncio.create_task(p.rollout(requests("zero", 4)))
        scaling = asyncio.create_task(p.scale(0))
        await asyncio.sleep(0.1)
        search.hold = False
        await scaling
        assert {t.worker for t in await batch} == {"w1.1"}
        assert p.workers() == []
        with pytest.raises(EnvironmentLacks, match="scaled to 0") as e:
            await p.rollout(requests("none", 2))
        assert e.value.exit_code == 3
        with pytest.raises(ValueError, match="negative"):
            await p.scale(-1)
        await p.scale(1)
        done = await p.rollout(requests("again", 4))
        assert {(t.worker, t.policy_version) for t in done} == {("w0.2", 1)}


async def test_a_worker_that_hangs_is_found_out_and_replaced(cluster, quick, policy, search, monkeypatch):
    """Stopped in mid-trajectory, then another one in mid-sync."""
    monkeypatch.setattr(membership, "SILENCE_SECONDS", 10.0)
    async with pool(policy.path, search.url, workers=2, sync=WeightSyncSettings(timeout_seconds=10)) as p:
        await p.start()
        async with searching(search, 10):
            batch = asyncio.create_task(p.rollout(requests("hang", 10)))
        stopped = p.workers()[0]
        os.kill(stopped.pid, signal.SIGSTOP)
        search.hold = False
        done = await asyncio.wait_for(batch, 60)
        assert sorted(t.uid for t in done) == [r.uid for r in requests("hang", 10)]
        assert "has not answered for 10 s" in events_of(p, "worker_lost")[0]["reason"]
        await until(lambda: len(in_state(p, "ready")) == 2)
        assert not psutil.pid_exists(stopped.pid) and in_state(p, "ready")[0].pid != stopped.pid
        os.kill(p.workers()[1].pid, signal.SIGSTOP)
        model, update = published(policy, 1)
        await p.sync(update)
        assert "within weight_sync.timeout_seconds=10" in events_of(p, "sync_failed")[0]["reason"]
        assert {t.worker for t in await p.rollout(requests("rest", 4))} == {"w0.2"}, (
            "who did not take the weights does not serve"
        )
        await until(lambda: len(in_state(p, "ready")) == 2)
        assert [(w.id, w.policy_version) for w in p.workers()] == [("w0.2", 1), ("w1.2", 1)]
        assert await difference(p, "w1.2", model) < 1e-4


async def test_a_crash_loop_is_bounded_and_reported(cluster, quick, search, tmp_path):
    policy = SimpleNamespace(path=str(tmp_path / "m"), model=searcher(tmp_path / "m"))
    async with pool(policy.path, search.url, workers=1) as p:
        await p.start()
        os.rename(policy.path, tmp_path / "gone")
        async with searching(search, 2):
            batch = asyncio.create_task(p.rollout(requests("lost", 2)))
        os.kill(p.workers()[0].pid, signal.SIGKILL)
        with pytest.raises(
            EnvironmentLacks, match=r"replacements ended one after the other .*, the last by UserError"
        ) as e:
            await asyncio.wait_for(batch, 60)
        assert e.value.exit_code == 3
        assert events_of(p, "crash_loop") and events_of(p, "worker_start_failed")


async def test_a_worker_that_fails_to_start_ends_the_start_with_its_reason(cluster, policy, search, tmp_path):
    async with pool(tmp_path, search.url) as p:
        with pytest.raises(UserError, match=f"model.path {tmp_path}: no tokenizer could be loaded") as e:
            await asyncio.wait_for(p.start(), 150)
        assert e.value.exit_code == 2
        assert p.workers() == []


async def test_a_worker_that_the_cluster_has_no_room_for_is_an_error_with_demand_and_supply(
    cluster, policy, search, monkeypatch
):
    monkeypatch.setattr(placement, "SCHEDULE_SECONDS", 2.0)
    async with pool(policy.path, search.url, tensor_parallel=99) as p:
        with pytest.raises(
            EnvironmentLacks, match=r"asks for GPU 99; the cluster has CPU 3 free of 3, GPU 0 free of 0"
        ) as e:
            await asyncio.wait_for(p.start(), 30)
        assert e.value.exit_code == 3
    assert ray.available_resources()["CPU"] == 3


async def test_lockstep_gives_the_same_run_also_when_a_worker_dies(cluster, quick, policy, search):
    async with pool(policy.path, search.url, workers=2, deterministic=True) as p:
        await p.start()
        batch = requests("same", 20)
        first = await p.rollout(batch)
        async with searching(search, 20):
            again = asyncio.create_task(p.rollout(batch))
        os.kill(p.workers()[1].pid, signal.SIGKILL)
        search.hold = False
        seen = []
        second = await again
        third = await p.rollout(batch, on_done=lambda t: seen.append(t.uid))
        for a, b, c in zip(first, second, third, strict=True):
            assert a.segments == b.segments == c.segments
        assert seen == [r.uid for r in batch]
        assert {t.worker for t in first} == {"w0.1", "w1.1"} and {t.worker for t in third} == {"w0.1", "w1.2"}
        with pytest.raises(ValueError, match="more than once"):
            await p.rollout([batch[0], batch[0]])
