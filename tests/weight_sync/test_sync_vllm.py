"""Weight sync by group broadcast into real vLLM engines, which live in processes of their own."""

from __future__ import annotations

import asyncio
import os
import signal

import psutil
import pytest
import ray
import torch
from pool_world import ROWS, difference, events_of, in_state, until
from rollout_fakes import request
from rollout_models import reference_logprobs
from rollout_search import search_server
from sync_world import LONG, LocalLearner, change, pool, sync, wide_model

from services.contracts import WeightsReceiver
from services.rollout.engines.vllm_engine import ENVIRONMENT
from services.settings import RolloutSettings, WeightSyncSettings
from services.weight_sync.broadcast import WeightReceiver, listed
from services.weight_sync.group import host_store, offer_loan

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.timeout(600),
]


def learner_of(model):
    return LocalLearner(model, WeightSyncSettings(backend="gloo", timeout_seconds=30, bucket_mib=1))


async def test_vllm_workers_take_weights_lend_them_and_outlive_each_other(tmp_path):
    model = wide_model(tmp_path / "m")
    learner = learner_of(model)
    ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False)
    try:
        with search_server() as search:
            async with pool(tmp_path / "m", engine="vllm", retriever_url=search.url, timeout=30) as p:
                await p.start()
                change(model, 1)
                await sync(learner, p, 1)
                assert await difference(p, "w0.1", model) < 1e-4
                assert await difference(p, "w0.1", model, 0.6, LONG) < 1e-4

                # A second one joins: raw parameters from the first, which samples meanwhile.
                batch = asyncio.create_task(
                    p.rollout([request(f"a{i}", group=f"a{i}", seed=i) for i in range(40)])
                )
                await p.scale(2)
                await until(lambda: len(in_state(p, "ready")) == 2, 200)
                assert [e["lender"] for e in events_of(p, "weights_lent")] == ["w0.1"]
                assert await difference(p, "w1.1", model) < 1e-4
                assert {t.policy_version for t in await batch} == {1}

                # New weights while trajectories run: those go on, and what they cached is forgotten.
                batch = asyncio.create_task(
                    p.rollout([request(f"b{i}", group=f"b{i}", seed=i) for i in range(60)])
                )
                await asyncio.sleep(0.1)
                change(model, 2)
                await sync(learner, p, 2)
                for worker in ("w0.1", "w1.1"):
                    assert await difference(p, worker, model) < 1e-4
                # The same prompts as before, by generation: what was cached of them under the old weights is
                # not used.
                assert await difference(p, "w0.1", model, 0.6, LONG) < 1e-4
                done = await batch
                assert len(done) == 60 and not events_of(p, "trajectory_retry")
                for t in done:
                    for action in t.actions:
                        assert action.policy_version in (1, 2)

                # The engine of one dies in mid-broadcast under its living actor.
                engines = psutil.Process(p._roster.get("w1.1").info.pid).children(recursive=True)

                def hook(i):
                    if i == 14:
                        learner.hook = lambda i: None
                        for engine in engines:
                            os.kill(engine.pid, signal.SIGKILL)

                learner.hook = hook
                change(model, 3)
                assert await sync(learner, p, 3) < 30
                assert [e["worker"] for e in events_of(p, "worker_lost")] == ["w1.1"]
                assert await difference(p, "w0.1", model) < 1e-4
    finally:
        ray.shutdown()


@pytest.mark.chaos  # six processes that hold a model: too slow for every day
async def test_each_part_of_a_vllm_worker_takes_its_share_and_lends_it(tmp_path):
    """Tensor parallelism in Ray's actors, on CPUs that Ray takes for GPUs."""
    model = wide_model(tmp_path / "m")
    learner = learner_of(model)
    ray.init(address="local", num_cpus=3, num_gpus=4, include_dashboard=False, log_to_driver=False)
    try:
        async with pool(tmp_path / "m", engine="vllm", tensor_parallel=2, timeout=30) as p:
            await p.start()
            for version in (1, 2):
                change(model, version)
                await sync(learner, p, version)
                assert await difference(p, "w0.1", model) < 1e-4
            assert learner.offers[-1].ranks == {"w0.1": 1} and learner.offers[-1].parts == 2
            await p.scale(2)
            await until(lambda: len(in_state(p, "ready")) == 2, 200)
            assert [e["lender"] for e in events_of(p, "weights_lent")] == ["w0.1"]
            assert await difference(p, "w1.1", model) < 1e-4
            change(model, 3)
            await sync(learner, p, 3)
            assert learner.offers[-1].ranks == {"w0.1": 1, "w1.1": 3}
            engines = psutil.Process(p._roster.get("w1.1").info.pid).children(recursive=True)
            for worker in ("w0.1", "w1.1"):
                assert await difference(p, worker, model, 0.6, LONG) < 1e-4

            # A part of one dies in mid-broadcast.
            def hook(i):
                if i == 14:
                    learner.hook = lambda i: None
                    os.kill(engines[-1].pid, signal.SIGKILL)

            learner.hook = hook
            change(model, 4)
            assert await sync(learner, p, 4) < 30
            assert [e["worker"] for e in events_of(p, "worker_lost")] == ["w1.1"]
            assert await difference(p, "w0.1", model) < 1e-4
        assert not [e for e in engines if e.is_running() and e.status() != psutil.STATUS_ZOMBIE]
    finally:
        ray.shutdown()


async def test_the_lockstep_engine_takes_part_too(tmp_path, without_llvmlite):
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from services.rollout.engines.vllm_engine import LockstepVllmEngine

    model = wide_model(tmp_path / "m", tied=False)
    settings = RolloutSettings(
        template="lab", kv_cache_gib=0.1, max_model_tokens=128, max_obs_tokens=32, max_response_tokens=16
    )
    engine = await LockstepVllmEngine.start(str(tmp_path / "m"), settings, seed=0)
    try:
        learner = learner_of(model)
        for version in (1, 2):
            change(model, version)
            update = learner.offer_weights(version, [WeightsReceiver("w0.1")])
            await asyncio.gather(
                asyncio.to_thread(learner.send_weights), engine.receive_weights(update.payload, "w0.1", None)
            )
            for temperature in (1.0, 0.6):
                rows = ROWS + LONG
                got, expected = (
                    await engine.logprobs(rows, temperature),
                    reference_logprobs(model, rows, temperature),
                )
                assert (
                    max(
                        abs(a - b)
                        for r, s in zip(got, expected, strict=True)
                        for a, b in zip(r, s, strict=True)
                    )
                    < 1e-4
                )

        # It lends as well: its own fused parameters, as they are.
        store, taken = host_store(20.0), {}
        own = engine._llm.model_executor.driver_worker.worker.model_runner.model.named_parameters()
        listing = listed(list(own))
        update = offer_loan(
            WeightSyncSettings(timeout_seconds=20), store, "gloo", "worker w0.1", WeightsReceiver("w1.1"), 2
        )

        def load(items):
            taken.update((name, tensor.clone()) for name, tensor in items)

        def take():
            WeightReceiver().receive(
                update.payload,
                "w1.1",
                0,
                device=torch.device("cpu"),
                load=None,
                load_raw=load,
                own=listing,
                problem=None,
            )

        await asyncio.gather(engine.lend_weights(update.payload), asyncio.to_thread(take))
        q = dict(model.named_parameters())["model.layers.0.self_attn.q_proj.weight"]
        assert torch.equal(taken["model.layers.0.self_attn.qkv_proj.weight"][: len(q)], q)
    finally:
        await engine.close()
