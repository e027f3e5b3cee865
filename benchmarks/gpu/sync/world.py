"""Workers and a learner for measurements of weight sync, and syncs between them as the driver does them."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.sync.actors import BenchRank
from benchmarks.gpu.sync.batches import batch_of
from benchmarks.gpu.sync.turns import turn
from services.contracts import TokenBatch, TrainBatch
from services.rollout.pool.pool import RolloutPool
from services.worker_state import WorkerState
from trainer.config.schema import Config, parse_config
from trainer.learner.group import LearnerGroup
from trainer.loop.update.sync import run_with_resync, sync_weights

BEGAN = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGAN:6.1f} s] {text}", flush=True)


def config_of(
    model: Path, options: argparse.Namespace, *, workers: int, stage: int = 2, temperature: float = 1.0
) -> Config:
    return parse_config(
        {
            "model": {"path": str(model)},
            "data": {"train": "unused.jsonl"},
            "retriever": {"url": "http://127.0.0.1:1"},
            "rollout": {
                "workers": workers,
                "engine": options.engine,
                "head_dtype": options.head_dtype,
                "template": "lab",
                "temperature": temperature,
                "max_model_tokens": 512,
                "max_response_tokens": 64,
                "max_obs_tokens": 64,
                "gpu_memory_utilization": options.memory,
                # Given, since vLLM would measure the memory while others that start beside it take theirs.
                "kv_cache_gib": 0.2 if options.device == "cpu" else 1.0,
                "start_timeout_seconds": 400,
                "prompts_per_step": 4,
                "group_size": 4,
            },
            "algorithm": {"llds": {"lambda": 0}},
            "learner": {
                "zero_stage": stage,
                "lr": 2e-6,
                "minibatches_per_batch": 1,
                "gradient_checkpointing": True,
            },
            "weight_sync": {
                "backend": options.backend,
                "timeout_seconds": options.timeout,
                "bucket_mib": 256,
            },
        }
    )


class FirstOf:
    """A pool of which only the first workers are sent weights; the others keep what they have."""

    def __init__(self, pool: RolloutPool, count: int):
        self.pool, self.count, self.sync = pool, count, pool.sync

    async def receivers(self, version: int) -> list[Any]:
        return (await self.pool.receivers(version))[: self.count]


class World:
    """A pool and a learner, and syncs between them as the driver does them."""

    def __init__(self, options: argparse.Namespace, model: Path, workers: int):
        self.options, self.model, self.version = options, model, 0
        self.vocabulary = min(json.loads((model / "config.json").read_text())["vocab_size"], 100_000)
        self.events: list[dict[str, Any]] = []
        self.config = config_of(model, options, workers=workers)
        self.pool = RolloutPool(
            self.config.rollout,
            model_path=str(model),
            retriever_url=self.config.retriever.url,
            retriever_timeout_seconds=10,
            on_event=self._event,
            sync=self.config.weight_sync,
        )
        self.learner: LearnerGroup | None = None

    def _event(self, event: dict[str, Any]) -> None:
        self.events.append(event | {"at": time.monotonic()})
        say(f"event {json.dumps(event)}")

    async def start(self, **learner: Any) -> None:
        """Workers and learner beside each other; `learner` as in `start_learner`. Where one fails the other
        is waited for: a learner that starts in its thread is not one to close."""
        both = self._start_workers(), self.start_learner(**learner)
        for error in await asyncio.gather(*both, return_exceptions=True):
            if error is not None:
                raise error

    async def start_learner(
        self, *, actor: type = BenchRank, stage: int = 2, temperature: float = 1.0
    ) -> None:
        await self.close_learner()
        config = config_of(self.model, self.options, workers=1, stage=stage, temperature=temperature)
        self.learner = LearnerGroup(config, model_path=str(self.model))
        self.learner.actor_class = actor
        began = time.monotonic()
        await asyncio.to_thread(self.learner.start)
        if self.options.part == "speed" and self.options.bare and self.options.device == "gpu":
            await self.rank("import_bare")
        say(f"learner up (ZeRO {stage}, T={temperature:g}) in {time.monotonic() - began:.0f} s")

    async def close_learner(self) -> None:
        learner, self.learner = self.learner, None
        if learner is not None:
            await asyncio.to_thread(learner.close)

    async def _start_workers(self) -> None:
        began = time.monotonic()
        await self.pool.start()
        say(f"{len(self.pool.workers())} workers up in {time.monotonic() - began:.0f} s")

    async def __aenter__(self) -> World:
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.close_learner()
        await self.pool.close()

    async def sync(self, *, again: bool = False, only: int | None = None) -> float:
        """Seconds. only: to so many workers."""
        self.version += not again
        pool = self.pool if only is None else FirstOf(self.pool, only)

        async def on_learner(call: Any, *args: Any) -> tuple[Any, float]:
            return await asyncio.to_thread(call, *args), 0.0

        began = time.monotonic()
        await sync_weights(self.learner, pool, self.version, on_learner=on_learner, on_event=self._event)
        return time.monotonic() - began

    async def all_ready(self, count: int, lost: str) -> None:
        """Wait until so many workers are up and hold the weights, and the pool has noticed the loss of
        one."""

        async def ready() -> None:
            while True:
                workers = {w.id: w.state for w in self.pool.workers()}
                if lost not in workers and list(workers.values()) == [WorkerState.READY] * count:
                    return
                await asyncio.sleep(0.05)

        async def sync() -> None:
            async with turn(self.options.turns):
                await self.sync(again=True)

        await asyncio.wait_for(run_with_resync(self.pool, ready(), sync), 400)

    async def rank(self, method: str, *args: Any) -> Any:
        """A call of the benchmark's own on learner rank 0."""
        ref = getattr(self.learner._handles[0].actor, method).remote(*args)
        return await asyncio.wait_for(asyncio.wrap_future(ref.future()), 180)

    async def sampled(
        self, temperature: float, rows: int = 8, prompt: int = 8, tokens: int = 56
    ) -> TrainBatch:
        """Text that the first worker samples after prompts of random ids, under the weights that it holds."""
        worker = self.pool._roster.all()[0].worker.actor
        ref = worker.sample.remote(rows, prompt, tokens, temperature, self.vocabulary)
        made = await asyncio.wait_for(asyncio.wrap_future(ref.future()), 180)
        return batch_of([(ids[:prompt], ids[prompt:]) for ids in made], seed=99)

    async def differences(self, batch: TokenBatch, temperature: float) -> dict[str, float]:
        """|log-prob of learner - of each worker| over the action tokens, the worst worker's."""
        logp = (await asyncio.to_thread(self.learner.score, batch)).logp
        rows = [batch.token_ids[batch.row(b)].tolist() for b in range(len(batch))]
        mask, worst = batch.action_ids >= 0, {"mean": 0.0, "max": 0.0}
        for worker in self.pool.workers():
            scored = await self.pool.logprobs(worker.id, rows, temperature)
            gap = np.abs(np.concatenate([np.asarray(r, np.float32) for r in scored]) - logp)[mask]
            if gap.mean() >= worst["mean"]:
                worst = {"mean": float(gap.mean()), "max": float(gap.max())}
        return worst
