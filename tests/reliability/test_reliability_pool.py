"""Workers whose actor lives while the engine is dead, that never come up, and the GPUs that they see. On a
local Ray, real actors."""

from __future__ import annotations

import time

import pytest
import ray
from fake_gpus import lines_of
from places import PYTHONPATH
from pool_world import difference, events_of, in_state, until
from reliability_actors import BrokenWorker, DeadEngineWorker
from rollout_fakes import request
from rollout_search import search_server
from sync_world import LocalLearner, change, pool, sync, wide_model

from services.common.errors import EnvironmentLacks
from services.rollout.pool import membership, placement
from services.settings import WeightSyncSettings

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.ray]


@pytest.fixture(scope="module")
def cluster():
    paths = PYTHONPATH
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )
    yield
    ray.shutdown()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(membership, "HEARTBEAT_SECONDS", 0.2)
    monkeypatch.setattr(membership, "FIRST_BACK_OFF_SECONDS", 0.1)


async def test_a_worker_whose_engine_is_dead_is_replaced_and_its_successor_holds_the_weights(
    cluster, quick, monkeypatch, tmp_path
):
    """Its actor is there and answers: no request may go to it again."""
    monkeypatch.setattr(placement, "RolloutWorker", DeadEngineWorker)
    path = tmp_path / "m"
    model = wide_model(path)
    learner = LocalLearner(model, WeightSyncSettings(backend="gloo", timeout_seconds=20, bucket_mib=1))
    with search_server() as search:
        async with pool(path, workers=2, retriever_url=search.url) as p:
            await p.start()
            change(model, 1)
            await sync(learner, p, 1)
            actor, pid = p.workers()[0].id, p.workers()[0].pid
            (path / f"dead-{actor}").touch()
            await until(lambda: events_of(p, "worker_lost"))
            assert "the engine's process has ended" in events_of(p, "worker_lost")[0]["reason"]
            await until(lambda: len(in_state(p, "ready")) == 2)
            assert [(w.id, w.policy_version) for w in p.workers()] == [("w0.2", 1), ("w1.1", 1)]
            assert p.workers()[0].pid != pid and await difference(p, "w0.2", model) < 1e-4
            assert len(await p.rollout([request(f"u{i}", group=f"g{i}") for i in range(4)])) == 4
            assert sum(w.trajectories for w in p.workers()) == 4 == p.trajectories and p.tokens_per_s() > 0


async def test_a_worker_that_raises_in_its_constructor_ends_the_start_with_its_name_and_reason(
    cluster, monkeypatch, tmp_path
):
    monkeypatch.setattr(placement, "RolloutWorker", BrokenWorker)
    began = time.monotonic()
    async with pool(tmp_path, workers=1) as p:
        with pytest.raises(
            EnvironmentLacks,
            match=r"rollout worker w0\.1 died while it started.*no such thing as a worker here",
        ) as e:
            await p.start()
    assert e.value.exit_code == 3 and time.monotonic() - began < 150


async def test_what_the_cluster_can_never_hold_is_said_with_demand_and_supply(cluster, monkeypatch, tmp_path):
    monkeypatch.setattr(placement, "RolloutWorker", BrokenWorker)
    async with pool(tmp_path, workers=1) as p:
        assert p.lacking(4, {}) is None
        assert p.lacking(99, {}) == "99 rollout workers ask for CPU 99; the cluster has CPU 4"
        assert p.lacking(3, {"CPU": 1.0}) is None
        assert (
            p.lacking(4, {"CPU": 1.0, "learner": 1.0})
            == "4 rollout workers ask for CPU 4; the cluster has CPU 4, of which the learner has CPU 1"
        )
    settings = p._settings
    supply = {"CPU": 8.0, "GPU": 4.0}
    assert placement.lacking(settings, 3, supply, held={"CPU": 1.0, "GPU": 1.0}) is None
    assert placement.lacking(settings, 4, supply, held={"CPU": 1.0, "GPU": 1.0}) == (
        "4 rollout workers ask for GPU 4; the cluster has GPU 4, of which the learner has GPU 1"
    )


async def test_each_worker_sees_the_gpu_that_was_reserved_for_it():
    """Fake GPUs, in a process of its own."""
    script = """
import asyncio, ray
from reliability_actors import GpuWorker
from services.rollout.pool import placement
from services.rollout.pool.placement import WorkerArguments
from services.settings import RolloutSettings, WeightSyncSettings
ray.init(address="local", num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False)
placement.RolloutWorker = GpuWorker
async def seen():
    settings, out = RolloutSettings(engine="transformers"), []
    for i in range(2):
        group = await placement.reserve(settings)
        arguments = WorkerArguments("", "", 1, WeightSyncSettings())
        worker = placement.create_worker(f"w{i}.1", settings, group, arguments)
        out.append((await worker.info(timeout_seconds=200), worker))
    return sorted(s for s, _ in out)
print("saw", asyncio.run(seen()))
"""
    said, written = lines_of(script, 200)
    assert said == ["saw ['0', '1']"], written
