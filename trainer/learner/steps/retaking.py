"""An optimiser step that ran out of memory, undone as if it had not begun.

Nothing of a step reaches weights or optimiser before its very end. Until then it leaves gradients, the
log-probs that micro-batches hold, numbers drawn by lot, and DeepSpeed's notes on what it has reduced.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from services.common.errors import UnspiralError
from trainer.learner.batches.micro_batches import MicroBatch
from trainer.learner.zero import ZeroEngine

_PLAIN = (bool, int, float, str, type(None), Tensor)
_CONTAINERS = (list, dict, set)


class Attempt:
    """One try of an optimiser step. Make it before the first forward pass."""

    def __init__(self, engine: ZeroEngine, part: list[MicroBatch]) -> None:
        self._engine = engine
        self._part = part
        self._logp_old = [m.logp_old for m in part]
        self._rng = torch.get_rng_state()
        self._gpu_rng = torch.cuda.get_rng_state(engine.device) if engine.device.type == "cuda" else None
        self._notes = [_Notes(thing) for thing in _keepers_of_notes(engine)]
        self._versions = _versions(engine)

    def undo(self) -> None:
        """Everything as it was. Raises UnspiralError where the optimiser had begun to change weights."""
        # Counters that autograd keeps for each tensor: comparing them costs nothing, a copy of the weights
        # would cost what has just run out.
        now = _versions(self._engine)
        if any(now.get(key) != version for key, version in self._versions.items()):
            raise UnspiralError(
                "memory ran out while the optimiser changed the weights, so that this step cannot be repeated"
            )
        for notes in self._notes:
            notes.restore()
        self._engine.engine.optimizer.zero_grad()
        for m, logp in zip(self._part, self._logp_old, strict=True):
            m.logp_old = logp
        torch.set_rng_state(self._rng)
        if self._gpu_rng is not None:
            torch.cuda.set_rng_state(self._gpu_rng, self._engine.device)
        gc.collect()


class Reductions:
    """Under ZeRO 2 each backward pass reduces gradients over all ranks, in an order that its graph fixes. A
    rank that ran out of memory has to come to the rest of them, or the others wait for it for ever.

    Counts the reductions of the micro-batch in hand."""

    def __init__(self, engine: ZeroEngine) -> None:
        self._engine = engine
        self._reduce = engine.engine.optimizer.average_tensor
        self.done = 0
        self._left_out = 0
        # The one method through which DeepSpeed's ZeRO 2 reduces a full bucket.
        engine.engine.optimizer.average_tensor = self

    def __call__(self, *given: Any) -> None:
        if self._left_out:
            self._left_out -= 1
            return
        self._reduce(*given)
        self.done += 1

    def finish(self, micro_batches: int) -> None:
        """Come to the reductions of so many micro-batches, without those that the first has had, with
        gradients of 0."""
        self._left_out = self.done
        for _ in range(micro_batches):
            self._engine.backward(self._engine.no_loss())
        self.done = 0


def add_gradients(engine: ZeroEngine, losses: Iterator[Tensor], reductions: Reductions | None = None) -> int:
    """Add up the gradients of micro-batches. Returns the number of those that memory was enough for."""
    done = 0
    with suppress(torch.OutOfMemoryError):  # the caller tries again in smaller parts
        for loss in losses:
            engine.backward(loss)
            del loss  # its graph would live on through the next forward pass
            done += 1
            if reductions is not None:
                reductions.done = 0
    return done


class _Notes:
    """The plain values and containers of an object, one level deep."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing
        self._values = {name: v for name, v in vars(thing).items() if isinstance(v, _PLAIN + _CONTAINERS)}
        self._items = {name: v.copy() for name, v in self._values.items() if isinstance(v, _CONTAINERS)}

    def restore(self) -> None:
        """The same objects again, with the items that they had."""
        vars(self._thing).update(self._values)
        for name, items in self._items.items():
            container: Any = self._values[name]
            container.clear()
            (container.extend if isinstance(items, list) else container.update)(items)


def _keepers_of_notes(engine: ZeroEngine) -> list[Any]:
    """The objects in which DeepSpeed notes how far a step has come."""
    optimizer = engine.engine.optimizer
    buckets = getattr(optimizer, "ipg_buckets", {}).values()
    hooks = getattr(optimizer, "_backward_hook_state", None)
    basic = engine.engine.basic_optimizer
    return [engine.engine, optimizer, *([basic] if basic is not optimizer else []), *buckets] + (
        [hooks] if hooks is not None else []
    )


def _versions(engine: ZeroEngine) -> dict[tuple[int, str], int]:
    """How often each of the optimiser's tensors was changed in place. What it makes at its first step is not
    among them before that."""
    basic = engine.engine.basic_optimizer
    params = [p for group in basic.param_groups for p in group["params"]]
    tensors = {(id(p), ""): p for p in params} | {
        (id(p), key): value
        for p, state in basic.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }
    return {key: tensor._version for key, tensor in tensors.items()}
