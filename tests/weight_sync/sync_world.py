"""Parts of the weight sync tests: a policy of several buckets, and a learner that is a thread of the test."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pool_world
import torch
from rollout_models import tiny_model

from services.rollout.pool.pool import RolloutPool
from services.settings import WeightSyncSettings
from services.weight_sync.broadcast import BroadcastSource
from trainer.loop.update.sync import sync_weights

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


def pool(path: Path, *, retriever_url="http://127.0.0.1:1", timeout=20.0, backend="gloo", **changes):
    """A pool whose weights come by broadcast, in buckets of 1 MiB; its policy does not search."""
    sync = WeightSyncSettings(backend=backend, timeout_seconds=timeout, bucket_mib=1)
    return pool_world.pool(path, retriever_url, sync=sync, **{"max_turns": 1} | changes)


async def sync(learner, made: RolloutPool, version: int) -> float:
    """As the driver does it; seconds."""
    began = time.monotonic()

    async def on_learner(call, *args):
        return await asyncio.to_thread(call, *args), 0.0

    await sync_weights(learner, made, version, on_learner=on_learner, on_event=made.events.append)
    return time.monotonic() - began
