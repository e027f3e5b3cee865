"""vLLM on a GPU: the sampler's log-probs are the learner's, the GPU is given away in sleep, and nothing of it
is kept after the end."""

import asyncio
import time

import pytest
import torch
from test_gpu_learner import model  # noqa: F401 - a fixture

from services.common.errors import UnspiralError
from services.rollout.engines.base import GenerateCall
from services.settings import RolloutSettings
from trainer.learner.model.policy import load_policy

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; PyTorch sees none"),
    pytest.mark.vllm,
    pytest.mark.timeout(300),
]
SETTINGS = RolloutSettings(max_model_tokens=1024, gpu_memory_utilization=0.3, share_gpus=True, compile="off")


def used_gib():
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def calls(temperature):
    return [
        GenerateCall(f"r{i}", [(7 * i + j) % 4000 for j in range(40)], 60, temperature, None, ())
        for i in range(16)
    ]


@torch.no_grad()
def learner_logps(policy, prompt, written, temperature):
    policy.temperature = temperature
    ids = torch.tensor([prompt + written], device="cuda")
    columns = torch.arange(len(prompt), ids.shape[1], device="cuda")
    return policy(ids, torch.zeros_like(columns), columns)[0].float().cpu()


def test_sampler_and_learner_agree_sleep_gives_memory_free_and_the_end_leaves_none(model):
    """One engine for all of it: its start takes most of a minute."""
    policy = load_policy(model, dtype=torch.bfloat16, temperature=1.0, chunk_tokens=512).to("cuda")
    before = used_gib()

    async def run():
        from services.rollout.worker import worker

        engine = await worker.start_engine(SETTINGS, str(model), 0)
        try:
            differences = {}
            for temperature in (1.0, 0.6):
                generations = await engine.generate_batch(calls(temperature))
                gaps = [
                    learner_logps(policy, call.token_ids, g.token_ids, temperature) - torch.tensor(g.logprobs)
                    for call, g in zip(calls(temperature), generations, strict=True)
                ]
                differences[temperature] = float(torch.cat(gaps).abs().mean())
            # Log-probs are of logits / T, so the rounding of bfloat16 weighs 1 / T.
            assert all(difference * temperature < 0.02 for temperature, difference in differences.items()), (
                differences
            )
            # The same support: the mean over samples of exp(learner - sampler) is 1.
            ratio = float(torch.cat(gaps).exp().mean())
            assert abs(ratio - 1) < 0.05, ratio

            row = calls(1.0)[0].token_ids
            [awake] = await engine.logprobs([row], 1.0)
            held = used_gib()
            await engine.sleep()
            asleep = used_gib()
            assert held - asleep > 0.5 * (held - before), (before, held, asleep)
            with pytest.raises(UnspiralError):
                await engine.generate_batch(calls(1.0)[:1])
            await engine.wake()
            await engine.reset_prefix_cache()
            [again] = await engine.logprobs([row], 1.0)
            assert max(abs(a - b) for a, b in zip(awake, again, strict=True)) < 1e-3
        finally:
            await engine.close()

    asyncio.run(run())
    for _ in range(20):
        if used_gib() - before < 0.3:
            break
        torch.cuda.synchronize()
        time.sleep(0.5)
    assert used_gib() - before < 0.3, (before, used_gib())
