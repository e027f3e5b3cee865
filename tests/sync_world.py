"""Parts of the weight sync tests: a policy of several buckets, and a learner that is a thread of the test."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from pathlib import Path

import torch
from rollout_models import reference_logprobs, tiny_model

from services.rollout.pool.pool import RolloutPool
from services.settings import RolloutSettings, WeightSyncSettings
from services.weight_sync.broadcast import BroadcastSource
from trainer.loop.sync import sync_weights

ROWS = [[1, 13, 14, 30, 17, 6, 25, 7, 8, 12, 9, 6, 26], [1, 25, 9, 10, 27]]
LONG = [[3 + i * i % 28 for i in range(100)]]
"""Longer than the blocks (32 tokens on a CPU) by which vLLM caches prompts."""


def wide_model(folder: Path, *, seed: int = 0, tied: bool = True):
    """A random Qwen2 of 9 MB: ten buckets of 1 MiB. Written to `folder`; returns the transformers model."""
    shape = {
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    }
    model = tiny_model(folder, tied=tied, max_position_embeddings=256, **shape)
    change(model, seed)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def change(model, seed: int) -> None:
    """Other weights, in place."""
    random = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.normal_(0, 0.08, generator=random) if p.ndim > 1 else p.uniform_(0.5, 1.5, generator=random)


class LocalLearner:
    """A model and the real sending side, without Ray and DeepSpeed. `hook(i)` is called before the i-th
    tensor is handed over."""

    def __init__(self, model, settings: WeightSyncSettings):
        self.model, self.hook, self.offers = model, lambda i: None, []
        self.source = BroadcastSource(settings, "gloo", torch.device("cpu"), "float32")

    def offer_weights(self, version, receivers):
        shapes = [(name, tuple(p.shape)) for name, p in self.model.named_parameters()]
        update = self.source.offer(shapes, version, receivers)
        self.offers.append(update.payload)
        return update

    def send_weights(self):
        self.source.send(self._tensors())

    def _tensors(self):
        for i, (name, p) in enumerate(self.model.named_parameters()):
            self.hook(i)
            yield name, p.detach()


@asynccontextmanager
async def pool(path: Path, *, retriever_url="http://127.0.0.1:1", timeout=20.0, backend="gloo", **changes):
    settings = RolloutSettings(
        **{
            "engine": "transformers",
            "workers": 1,
            "template": "lab",
            "kv_cache_gib": 0.1,
            "max_turns": 1,
            "max_obs_tokens": 32,
            "max_response_tokens": 16,
            "max_model_tokens": 128,
            "start_timeout_seconds": 400,
        }
        | changes
    )
    events = []
    made = RolloutPool(
        settings,
        model_path=str(path),
        retriever_url=retriever_url,
        retriever_timeout_seconds=20,
        on_event=events.append,
        sync=WeightSyncSettings(backend=backend, timeout_seconds=timeout, bucket_mib=1),
    )
    made.events = events
    try:
        yield made
    finally:
        await made.close()


async def sync(learner, made: RolloutPool, version: int) -> float:
    """As the driver does it; seconds."""
    began = time.monotonic()

    async def on_learner(call, *args):
        return await asyncio.to_thread(call, *args), 0.0

    await sync_weights(learner, made, version, on_learner=on_learner, on_event=made.events.append)
    return time.monotonic() - began


async def difference(made: RolloutPool, worker: str, model, temperature: float = 1.0, rows=ROWS) -> float:
    """Largest |log-prob of the worker, over its own RPC - log-prob by transformers|."""
    got = await made.logprobs(worker, rows, temperature)
    expected = reference_logprobs(model, rows, temperature)
    return max(abs(a - b) for r, s in zip(got, expected, strict=True) for a, b in zip(r, s, strict=True))


def events_of(made: RolloutPool, kind: str) -> list[dict]:
    return [e for e in made.events if e["event"] == kind]


def in_state(made: RolloutPool, state: str) -> list:
    return [w for w in made.workers() if w.state == state]


async def until(condition, seconds=90):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        await asyncio.sleep(0.02)
