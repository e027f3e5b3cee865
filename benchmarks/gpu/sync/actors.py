"""Actors of benchmarks/gpu_sync.py: vLLM's own weight transfer engine called bare, in the same processes and
on the same GPUs as ours."""

from __future__ import annotations

import asyncio
import os
import random
import time
from types import SimpleNamespace
from typing import Any

import ray

from services.contracts import TokenBatch
from services.rollout.engines.base import GenerateCall
from services.rollout.worker.worker import RolloutWorker
from trainer.learner.batches.micro_batches import make_microbatch
from trainer.learner.model.policy import load_policy
from trainer.learner.rank_handle import RankActor
from trainer.learner.results import RankInfo


class BenchWorker(RolloutWorker):
    """A rollout worker whose engine also has vLLM's transfer engine. Eager where `model_path` holds a file
    `eager` (a faster start)."""

    async def start(self):
        import pathlib

        from services.rollout.engines import vllm_engine

        if self._settings.engine != "vllm":
            return await super().start()
        plain = vllm_engine._arguments

        def arguments(*args):
            import torch
            from vllm.config import WeightTransferConfig

            more = {"enforce_eager": True} if (pathlib.Path(self._model_path) / "eager").exists() else {}
            if torch.cuda.is_available():
                more["weight_transfer_config"] = WeightTransferConfig(backend="nccl")
                # Given, not measured: engines of two measurements may start on one card.
                more["kv_cache_memory_bytes"] = 2**30
            return plain(*args) | more

        vllm_engine._arguments = arguments
        return await super().start()

    async def sample(
        self, rows: int, prompt: int, tokens: int, temperature: float, vocabulary: int
    ) -> list[list[int]]:
        """Prompts of random ids, and what the model writes after each."""
        draw = random.Random(7)
        engine = self._ready()

        async def one(row: int) -> list[int]:
            ids = [draw.randrange(3, vocabulary) for _ in range(prompt)]
            name = f"sample-{row}-{time.monotonic_ns()}"
            written = await engine.generate(GenerateCall(name, ids, tokens, temperature, None, ()))
            return ids + written.token_ids

        return list(await asyncio.gather(*map(one, range(rows))))

    async def bare(self, method: str, info: dict[str, Any] | None = None) -> None:
        """One call of vLLM's weight transfer."""
        from vllm.distributed.weight_transfer.base import (
            WeightTransferInitRequest,
            WeightTransferUpdateRequest,
        )

        llm = self._engine._llm
        if method == "init_weight_transfer_engine":
            await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))
        elif method == "update_weights":
            await llm.update_weights(WeightTransferUpdateRequest(update_info=info))
        else:
            await getattr(llm, method)()


class BareClient:
    """vLLM's trainer talks to its engines through this; worker i has rank 1 + i."""

    def __init__(self, workers: list[Any]):
        self.workers = workers

    def _all(self, method: str, infos: list[Any]) -> None:
        ray.get(
            [w.bare.remote(method, info) for w, info in zip(self.workers, infos, strict=True)], timeout=120
        )

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self._all(
            "init_weight_transfer_engine", [info | {"rank_offset": 1 + i} for i in range(len(self.workers))]
        )

    def start_weight_update(self) -> None:
        self._all("start_weight_update", [None] * len(self.workers))

    def update_weights(self, info: dict[str, Any]) -> None:
        self._all("update_weights", [info] * len(self.workers))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all("finish_weight_update", [None] * len(self.workers))

    def shutdown_weight_transfer_engine(self) -> None:
        self._all("shutdown_weight_transfer_engine", [None] * len(self.workers))


class BenchRank(RankActor):
    """A learner rank that also knows vLLM's own trainer side (one rank only)."""

    def import_bare(self) -> None:
        """What `bare_init` imports, which takes half a minute."""
        import vllm.distributed.weight_transfer.nccl_engine  # noqa: F401

    def bare_init(self, workers: list[Any]) -> float:
        """Form the group with these workers; seconds, without the import of vLLM."""
        import socket

        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        rank = self

        class Source(WeightSource):
            def metadata(self):
                return [ParamMeta(name, rank.dtype, shape) for name, shape in rank.engine.shapes()]

            def __iter__(self):
                return rank.engine.iter_weights(2**28)

        with socket.socket() as s:
            s.bind(("", 0))
            port = s.getsockname()[1]
        info = NCCLTrainerInitInfo(
            master_address=ray.util.get_node_ip_address(),
            master_port=port,
            world_size=1 + len(workers),
            rank=0,
        )
        began = time.monotonic()
        self.bare = WeightTransferTrainerFactory.trainer_init(
            info, client=BareClient(workers), source=Source()
        )
        return time.monotonic() - began

    def bare_send(self) -> float:
        """One transfer, its three calls to the workers included; seconds."""
        import torch

        began = time.monotonic()
        self.bare.send_weights()
        torch.cuda.synchronize()
        return time.monotonic() - began

    def perturb(self, scale: float) -> None:
        """Change the weights that are sent (not the optimiser's own)."""
        import torch

        with torch.no_grad():
            for _, p in self.engine.weights:
                target = p.ds_tensor.data if hasattr(p, "ds_tensor") else p.data
                target.add_(torch.randn_like(target), alpha=scale)

    def rounding(self, batch: TokenBatch) -> float:
        """Mean |log-prob in the compute dtype - log-prob in float32| of the batch's actions in nats, under
        the same weights: what the learner is away from itself. Not under ZeRO 3."""
        import torch

        options = self._policy_options() | {"compiled": False, "gradient_checkpointing": False}
        exact = load_policy(self.model_path, dtype=torch.float32, packed=self.packed, **options)
        weights = dict(self.engine.iter_weights(2**28))
        total, count = 0.0, 0
        with torch.no_grad():
            for name, p in exact.named_weights():
                p.copy_(weights[name])
            exact.to(self.device)
            for rows in self._deal(list(range(len(batch))), batch):
                m = make_microbatch(batch, rows, self.device, packed=self.packed)
                low, high = (self._forward_of(model, m)[0] for model in (self.engine, exact))
                total += float((low.float() - high).abs().sum())
                count += len(high)
        return total / max(count, 1)

    def memory_gib(self) -> float:
        """Peak of the GPU memory since the last call."""
        import torch

        peak = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
        return peak


class WeightsOnlyRank(BenchRank):
    """Weights without an optimiser: for models whose Adam state does not fit beside them."""

    def __init__(self, config: Any, **options: Any):
        super().__init__(config, **options)

    def setup(self, host: str, port: int) -> RankInfo:
        """Load the weights, and nothing else."""
        self._load()
        return RankInfo(os.getpid(), "", str(self.device), "", "", self._dtype_name, False, 0, 0)

    def _load(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.model_path, dtype=self.dtype).to(self.device)
        named = list(model.named_parameters())
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.engine = SimpleNamespace(
            weights=named,
            shapes=lambda: [(n, tuple(p.shape)) for n, p in named],
            iter_weights=lambda bucket: ((n, p.detach()) for n, p in named),
        )
