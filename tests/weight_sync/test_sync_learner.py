"""Weights of a real DeepSpeed learner in real rollout workers: ZeRO 1 and 3, one and two ranks, one and two
workers, tied and untied."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace

import pytest
import ray
import torch
from learner_world import make_batch, make_config
from places import PYTHONPATH
from pool_world import difference, events_of, in_state, until
from rollout_models import tiny_model
from sync_world import pool, sync
from test_learner_group import ReusableGroup

from trainer.learner.group import LearnerError

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def cluster():
    paths = PYTHONPATH
    environment = {"env_vars": {"PYTHONPATH": paths}}
    ray.init(
        address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, runtime_env=environment
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policies")
    return {
        kind: SimpleNamespace(path=folder / kind, model=tiny_model(folder / kind, tied=kind == "tied"))
        for kind in ("tied", "untied")
    }


def config_of(policy, ranks, stage):
    learner = {"ranks": ranks, "zero_stage": stage, "lr": 3e-2}
    return make_config(
        policy.path, learner=learner, weight_sync={"backend": "gloo", "bucket_mib": 1, "timeout_seconds": 30}
    )


async def trained(group, policy, seed):
    """One update by the learner; the transformers model then holds what the learner holds, gathered another
    way."""
    await asyncio.to_thread(group.update, make_batch(8, seed=seed), llds_lambda=0.2)
    weights = group.ask("weights")[0]
    with torch.no_grad():
        for name, p in policy.model.named_parameters():
            p.copy_(weights[name])


@pytest.mark.parametrize("ranks", [1, 2])
async def test_what_the_learner_holds_is_what_the_workers_sample_with(cluster, policies, ranks):
    group = ReusableGroup(config_of(policies["tied"], ranks, 1), model_path=str(policies["tied"].path))
    await asyncio.to_thread(group.start)
    try:
        for kind, stage in (("tied", 1), ("untied", 3)) if ranks == 1 else (("tied", 3), ("untied", 1)):
            policy, version = policies[kind], 0
            group.model_path = str(policy.path)
            async with pool(policy.path, timeout=30) as p:
                await p.start()
                await asyncio.to_thread(group.renew, config_of(policy, ranks, stage))
                for workers in (1, 2):
                    await p.scale(workers)
                    await until(lambda n=workers: len(in_state(p, "ready")) == n)
                    for _ in range(2):
                        version += 1
                        await trained(group, policy, 10 * ranks + version)
                        before = await difference(p, "w0.1", policy.model)
                        await sync(group, p, version)
                        assert before > 1e-2, "the update changed the policy"
                        for worker in p.workers():
                            assert await difference(p, worker.id, policy.model) < 1e-4
                            assert await difference(p, worker.id, policy.model, 0.6) < 1e-4
                assert not events_of(p, "sync_failed")
                # A rank that goes in mid-send is an error of the learner's; no worker waits for it.
                if (kind, ranks) == ("untied", 2):
                    for w in group.where[1:]:
                        os.kill(w.pid, 9)
                    with pytest.raises(LearnerError, match="learner rank"):
                        await asyncio.wait_for(sync(group, p, version + 1), 60)
    finally:
        await asyncio.to_thread(group.close)
