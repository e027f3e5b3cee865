"""Weight sync over NCCL into a vLLM worker of two GPUs. Three GPUs or more; skipped elsewhere."""

from __future__ import annotations

import asyncio
import os

import pytest
import torch
from test_sync_nccl import TWO_ROUNDINGS, agreement

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.skipif(
        GPUS < 3, reason=f"needs three GPUs, one for the learner and two for a worker; there are {GPUS}"
    ),
    pytest.mark.timeout(600),
    pytest.mark.ray,
    pytest.mark.vllm,
]


async def test_both_parts_of_a_worker_take_the_learners_weights(tmp_path):
    import ray
    from learner_world import make_batch, make_config
    from sync_world import pool, sync, wide_model

    from trainer.learner.group import LearnerGroup

    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    path = tmp_path / "m"
    model = wide_model(path)
    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    settings = {"backend": "nccl", "bucket_mib": 1, "timeout_seconds": 20}
    learner = LearnerGroup(make_config(path, weight_sync=settings), model_path=str(path))
    try:
        async with pool(path, engine="vllm", tensor_parallel=2, backend="nccl", timeout=20) as p:
            await asyncio.gather(p.start(), asyncio.to_thread(learner.start))
            for version in (1, 2, 3):
                await asyncio.to_thread(learner.update, make_batch(8, seed=version), llds_lambda=0.0)
                stale = await agreement((p, learner, make_batch, model))
                await sync(learner, p, version)
                assert await agreement((p, learner, make_batch, model)) < min(TWO_ROUNDINGS, stale)
    finally:
        await asyncio.to_thread(learner.close)
        ray.shutdown()
