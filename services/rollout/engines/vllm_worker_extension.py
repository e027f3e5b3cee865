"""Imported by vLLM inside the process that holds the model (`worker_extension_cls`): loads new weights there.

vLLM's CPU build packs linear weights into a private layout when the model is built and drops the originals:
loading new weights then fails, or leaves a tied output layer silently stale. So the packing is replaced, at
import and before any model exists, by a plain linear.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.model_executor.layers import utils as layer_utils
from vllm.platforms import current_platform
from vllm.tokenizers.hf import get_cached_tokenizer
from vllm.tokenizers.registry import TokenizerRegistry

from services.rollout.engines.base import check_all_loaded
from services.rollout.engines.owner import OWNER_VARIABLE, end_with
from services.rollout.worker.tokenizer import load_tokenizer
from services.weight_sync.broadcast import Outcome, WeightLender, WeightReceiver, listed, outcome_of
from services.weight_sync.group import Ticket

_PACKER = "dispatch_cpu_unquantized_gemm"


def plain_linear(layer: Any, remove_weight: bool) -> None:
    """In place of vLLM's packing: multiply by the weight as it is now."""
    layer.cpu_linear = torch.nn.functional.linear


def keep_cpu_weights_loadable() -> None:
    """Replace vLLM's weight packing. Raises RuntimeError where this vLLM has no such function, or calls it
    another way."""
    packer = getattr(layer_utils, _PACKER, None)
    if packer is plain_linear:
        return
    if packer is None or list(inspect.signature(packer).parameters) != ["layer", "remove_weight"]:
        raise RuntimeError(
            f"vllm.model_executor.layers.utils.{_PACKER}(layer, remove_weight) "
            "is not in this version of vLLM: weights would be packed, and could not be replaced. "
            "Use the pinned version of vLLM"
        )
    setattr(layer_utils, _PACKER, plain_linear)


class SavedTokenizer:
    """In place of vLLM's loader of Hugging Face tokenizers: the one that the folder holds; see
    services.rollout.worker.tokenizer."""

    @classmethod
    def from_pretrained(cls, path: str, *args: Any, **kwargs: Any) -> Any:
        return get_cached_tokenizer(load_tokenizer(path))


class WorkerExtension:
    """Methods that vLLM adds to its worker; called through `collective_rpc`. The attributes are the
    worker's own."""

    model_runner: Any
    rank: int
    device: torch.device

    def unspiral_load_weights(self, folder: str) -> int:
        """Load all safetensors files of `folder` into the model; returns the number of parameters that were
        set.

        Raises ValueError where a parameter of the model is left without a value.
        """
        model = self.model_runner.model
        files = sorted(Path(folder).glob("*.safetensors"))
        if not files:
            raise ValueError(f"{folder} holds no safetensors file")

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for file in files:
                with safe_open(file, "pt") as f:
                    names = f.keys()  # of a file, which is no mapping
                    for name in names:
                        yield name, f.get_tensor(name)

        with torch.inference_mode():
            loaded = set(model.load_weights(tensors()))
        check_all_loaded(dict(model.named_parameters()), loaded)
        return len(loaded)

    def unspiral_receive_weights(self, ticket: str, worker: str, problem: str | None) -> Outcome:
        """Take part in a group broadcast, and load what comes, each bucket as it comes. Returns the
        outcome, since exceptions lose their type on the way."""
        return outcome_of(lambda: self._unspiral_receive(Ticket.from_json(ticket), worker, problem))

    def _unspiral_receive(self, ticket: Ticket, worker: str, problem: str | None) -> None:
        model = self.model_runner.model
        self._unspiral_state()[1].stop()
        own = dict(model.named_parameters())
        loaded: set[str] = set()

        def load(items: list[tuple[str, torch.Tensor]]) -> None:
            loaded.update(model.load_weights(iter(items)))

        def load_raw(items: list[tuple[str, torch.Tensor]]) -> None:
            for name, tensor in items:
                own[name].copy_(tensor)
                loaded.add(name)

        with torch.inference_mode():
            self._unspiral_state()[0].receive(
                ticket,
                worker,
                self.rank,
                device=self.device,
                load=load,
                load_raw=load_raw,
                own=listed(own.items()),
                problem=problem,
            )
        check_all_loaded(own, loaded)

    def unspiral_lend_weights(self, ticket: str) -> None:
        """Begin to give this part's parameters to a joining worker, between the steps of this engine."""
        self._unspiral_state()[1].start(
            Ticket.from_json(ticket),
            self.rank,
            device=self.device,
            parameters=lambda: list(self.model_runner.model.named_parameters()),
        )

    def unspiral_lend_outcome(self) -> Outcome | None:
        """None while the loan goes on, then its outcome."""
        return self._unspiral_state()[1].outcome()

    def _unspiral_state(self) -> tuple[WeightReceiver, WeightLender]:
        # vLLM mixes this class into its worker, and calls no constructor of it.
        if not hasattr(self, "_unspiral_sync"):
            self._unspiral_sync = (WeightReceiver(), WeightLender())
        return self._unspiral_sync


TokenizerRegistry.tokenizers["hf"] = (__name__, SavedTokenizer.__name__)
if current_platform.is_cpu():
    keep_cpu_weights_loadable()
_owner = int(os.environ.get(OWNER_VARIABLE, "0"))
if _owner not in (0, os.getpid()):
    end_with(_owner)
