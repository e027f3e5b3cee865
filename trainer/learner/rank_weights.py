"""The weights of one rank on their way out and in: to rollout workers, as a Hugging Face folder, into a
checkpoint and back. No Ray in here.

Every rank makes every call: the others help rank 0 to gather what ZeRO has divided.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.common.files import write_json
from services.contracts import WeightsReceiver, WeightUpdate
from services.weight_sync import choose_backend, make_publisher, make_source
from trainer.config.schema import Config
from trainer.learner import checkpoint, export, tensor_files, zero


class RankWeights:
    """What a rank holds between two batches: the engine, counters, LLDS's snapshot. `LearnerRank` builds the
    engine, scores and updates."""

    engine: zero.ZeroEngine

    def __init__(self, config: Config, *, model_path: str, rank: int) -> None:
        self.config = config
        self.settings = config.learner
        self.algorithm = config.algorithm
        self.model_path = Path(model_path)
        self.rank = rank
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        auto = "bfloat16" if self.device.type == "cuda" else "float32"
        self.dtype: torch.dtype = getattr(torch, {"auto": auto}.get(self.settings.dtype, self.settings.dtype))
        self.publisher: Any = None
        self.source: Any = None
        self.sends: list[WeightsReceiver] = []
        self.optimiser_steps = 0
        self.batches = 0
        self.snapshot: dict[str, Tensor] | None = None
        self.snapshot_batch = 0
        self.base_weights: str | None = None
        """Checksum of the frozen weights beside LoRA adapters."""

    def offer(self, version: int, receivers: list[WeightsReceiver]) -> WeightUpdate | None:
        """Offer the weights to rollout workers as `version` (rank 0's result). shared_memory: with that they
        are sent too."""
        backend = choose_backend(
            self.config.weight_sync, learner_gpu=self.device.type == "cuda", receivers=receivers
        )
        # On every rank: in `send` all of them help to gather.
        self.sends = [] if backend == "shared_memory" else receivers
        if backend == "shared_memory":
            return self._publish(version)
        if self.rank != 0:
            return None
        if self.source is None:
            dtype = {"auto": "bfloat16" if self.device.type == "cuda" else "float32"}.get(
                self.config.rollout.dtype, self.config.rollout.dtype
            )
            self.source = make_source(self.config.weight_sync, backend, self.device, dtype)
        return self.source.offer(self.engine.shapes(), version, receivers)

    def send(self) -> None:
        """Send what was offered (rank 0; the others help to gather). Raises what
        services.weight_sync.base.Source.send does."""
        if self.sends:
            with _all_of(self.engine.iter_weights(self.config.weight_sync.bucket_mib * 2**20)) as weights:
                if self.rank == 0:
                    self.source.send(weights)

    def _publish(self, version: int) -> WeightUpdate | None:
        with _all_of(self.engine.iter_weights(self.config.weight_sync.bucket_mib * 2**20)) as weights:
            if self.rank != 0:
                return None
            if self.publisher is None:
                self.publisher = make_publisher(self.config.weight_sync)
            return self.publisher.publish(weights, version)

    def export_hf(self, path: str, asked: dict[str, Any] | None = None) -> None:
        """The policy in the compute dtype as a Hugging Face folder. asked: how it is asked, for its
        description."""
        with _all_of(self.engine.iter_weights(2**28)) as weights:
            if self.rank == 0:
                about = {"optimiser_steps": self.optimiser_steps} | ({"asked": asked} if asked else {})
                with export.exported(
                    Path(path), self.model_path, dtype=self._dtype_name, about=about
                ) as writer:
                    for name, tensor in weights:
                        writer.add(name, tensor)

    def save(self, path: str, state: dict[str, Any]) -> None:
        """Write a checkpoint (rank 0; the others help to gather)."""
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(checkpoint.written_aside(Path(path))) if self.rank == 0 else None
            with _all_of(self.engine.iter_master()) as master:
                if folder:
                    weights = tensor_files.TensorWriter(folder / "weights")
                    moments = tensor_files.TensorWriter(folder / "optimizer")
                    for name, tensor, state_of in master:
                        weights.add(name, tensor)
                        for key, value in state_of.items():
                            moments.add(f"{name}.{key}", value)
                    weights.finish()
                    moments.finish()
            if self.snapshot is not None:
                # Through the engine, which alone knows how ZeRO has divided it: weights and snapshot change
                # places.
                with self.engine.exchanged(self.snapshot), _all_of(self.engine.iter_trained(2**28)) as kept:
                    if folder:
                        writer = tensor_files.TensorWriter(folder / "snapshot")
                        for name, tensor in kept:
                            writer.add(name, tensor)
                        writer.finish()
            if folder:
                rng = tensor_files.TensorWriter(folder / "rng")
                rng.add("cpu", torch.get_rng_state())
                rng.finish()
                export.copy_model_files(self.model_path, folder / "model")
                write_json(folder / "learner.json", self._counters(), indent=1, sort_keys=True)
                write_json(folder / "state.json", state, indent=1, sort_keys=True)

    def load(self, path: str) -> dict[str, Any]:
        """Read a checkpoint. Returns the driver's state. Raises UserError for one that is torn or of another
        model."""
        folder = Path(path)
        if self.rank == 0:
            # Once, and not on each rank: the checksums read every byte.
            checkpoint.require_whole(folder)
        about = json.loads((folder / "learner.json").read_text())
        checkpoint.require_same_adapters(folder, about.get("lora"), self._lora)
        weights = tensor_files.TensorReader(folder / "weights")
        # AdamW has none before its first step.
        moments = tensor_files.TensorReader(folder / "optimizer") if about["adam_steps"] else None
        self.engine.load_master(weights, moments, about["adam_steps"])
        self.optimiser_steps = about["optimiser_steps"]
        self.batches = about["batches"]
        self.snapshot = None
        self.snapshot_batch = about["snapshot_batch"]
        if about["snapshot"] and self.algorithm.llds.anchor == "snapshot":
            self.snapshot = self.engine.local_copies(tensor_files.TensorReader(folder / "snapshot"))
        torch.set_rng_state(tensor_files.TensorReader(folder / "rng")("cpu"))
        return json.loads((folder / "state.json").read_text())

    @property
    def _dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def _counters(self) -> dict[str, Any]:
        return {
            "optimiser_steps": self.optimiser_steps,
            "batches": self.batches,
            "adam_steps": self.engine.adam_steps,
            "snapshot": self.snapshot is not None,
            "snapshot_batch": self.snapshot_batch,
            "dtype": self._dtype_name,
            "lora": self._lora,
        }

    @property
    def _lora(self) -> dict[str, Any] | None:
        """What an export needs to merge the adapters: the frozen weights' place and checksum, and the
        scale."""
        lora = self.settings.lora
        if lora is None:
            return None
        return {
            "base": str(self.model_path.resolve()),
            "weights": self.base_weights,
            "scale": self.engine.policy.lora_scale,
            "rank": lora.rank,
            "alpha": lora.alpha,
        }


@contextlib.contextmanager
def _all_of(items: Iterator[Any]) -> Iterator[Iterator[Any]]:
    """Go through whatever is left on leaving, also after an error: the other ranks are in the same collective
    operations."""
    try:
        yield items
    finally:
        for _ in items:
            pass
