"""The optimiser steps of one rank, and the memory for their activations. No Ray in here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from trainer.config.schema import Config
from trainer.learner.batches.micro_batches import MicroBatch
from trainer.learner.model import memory
from trainer.learner.model.policy import PolicyModel
from trainer.learner.rank_weights import RankWeights
from trainer.learner.steps.retaking import Attempt, Reductions, add_gradients

log = logging.getLogger("trainer.learner")
TRIED_AGAIN = 1.02
"""A micro-batch so many times as large as any before is tried first."""


def _model_tokens(m: MicroBatch) -> int:
    """Tokens that the model sees, padding included."""
    return (m.packed.input_ids if m.packed else m.input_ids).numel()


class RankSteps(RankWeights):
    """How a rank takes a step. `LearnerRank` chooses what goes into it."""

    def __init__(self, config: Config, *, model_path: str, rank: int) -> None:
        super().__init__(config, model_path=model_path, rank=rank)
        self.world_size = config.learner.ranks
        self.checkpointing = False
        self.tries_room = False
        self.activations = ""
        self.tokens_tried = 0
        """Tokens of the largest micro-batch that was seen to fit with its activations."""
        self.reductions: Reductions | None = None
        self.told: list[str] = []
        """What the next result of an update tells the driver: a rank's own log is read by nobody."""

    def _plan_memory(self, policy: PolicyModel) -> None:
        """Whether activations are kept, once the engine is built."""
        if self.engine.stage == 2 and self.world_size > 1:
            self.reductions = Reductions(self.engine)
        self.checkpointing = self.settings.gradient_checkpointing is True
        # Under ZeRO 3 a forward pass gathers weights from all ranks, and on CPU memory is not measured.
        self.tries_room = self.device.type == "cuda" and self.settings.zero_stage < 3
        if self.settings.gradient_checkpointing != "auto":
            return
        tokens = self.settings.tokens_per_microbatch
        decided = memory.plan_for_device(policy, tokens, self.device, self.engine.due_bytes())
        decided = decided.joined(not self._on_all_ranks(not decided.checkpointing))
        if decided.checkpointing:
            self._switch_on_checkpointing()
        self.activations = decided.line

    def _check_room(self, micros: list[list[MicroBatch]]) -> None:
        """Where activations are kept, and a micro-batch is larger than any before, try whether it fits. The
        try adds to no gradient, so that a step is never left half taken."""
        if self.settings.gradient_checkpointing != "auto" or self.checkpointing or not self.tries_room:
            return
        # A rank without rows goes on: the question at the end is one to all ranks.
        largest = max((m for part in micros for m in part), key=_model_tokens, default=None)
        tokens = 0 if largest is None else _model_tokens(largest)
        fits = True
        if largest is not None and tokens > TRIED_AGAIN * self.tokens_tried:
            policy = self.engine.policy
            due = self.engine.due_bytes()
            fits = memory.fits(policy, lambda: self._forward_of(policy, largest)[0], due)
            self.tokens_tried = max(tokens, self.tokens_tried)
        if not self._on_all_ranks(fits):
            self._tell(
                f"the activations of {tokens:,} tokens did not fit; from now on they are computed again in "
                "the backward pass (learner.gradient_checkpointing=auto)"
            )
            self._switch_on_checkpointing()

    def _switch_on_checkpointing(self) -> None:
        self.free_cached_gpu_memory()
        memory.switch_on_checkpointing(self.engine.policy)
        self.checkpointing = True

    def free_cached_gpu_memory(self) -> None:
        """Give the GPU memory that PyTorch caches back to the device. Weights and gradients stay."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _take_step(
        self, part: list[MicroBatch], losses: Callable[[], Iterator[Tensor]], lr: float
    ) -> tuple[float, bool]:
        """One optimiser step over the losses of some micro-batches. Where memory runs out without
        checkpointing, all ranks switch it on and take the same step again. Returns the gradient norm, and
        whether the step was taken."""
        # Nothing smaller is left to try with checkpointing. Under ZeRO 3 a rank that ran out of memory in a
        # forward pass could not come to the gathers in which the others wait.
        if self.checkpointing or self.engine.stage == 3:
            for loss in losses():
                self.engine.backward(loss)
            return self.engine.step(lr)
        attempt = Attempt(self.engine, part)
        done = add_gradients(self.engine, losses(), self.reductions)
        if done < len(part) and self.reductions is not None:
            # Memory first: the empty passes that meet the others' reductions need some themselves.
            attempt.undo()
            self.free_cached_gpu_memory()
            self.reductions.finish(len(part) - done)
        if self._on_all_ranks(done == len(part)):
            try:
                return self.engine.step(lr)
            except torch.OutOfMemoryError:
                if self.world_size > 1:  # the others are in the step's own collective operations
                    raise
        attempt.undo()
        self._tell(
            "memory ran out in an optimiser step, which was taken again; from now on activations are "
            "computed again in the backward pass, about a third slower (learner.gradient_checkpointing)"
        )
        self._switch_on_checkpointing()
        return self._take_step(part, losses, lr)

    def _tell(self, line: str) -> None:
        log.warning("learner: %s", line)
        self.told.append(line)

    def _on_all_ranks(self, well: bool) -> bool:
        """Whether all is well on every rank."""
        if self.world_size == 1:
            return well
        ill = torch.tensor(float(not well), device=self.device)
        torch.distributed.all_reduce(ill, op=torch.distributed.ReduceOp.MAX)
        return not bool(ill)

    def _forward_of(self, model: Any, m: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [N] of the action tokens."""
        if p := m.packed:
            out: tuple[Tensor, Tensor] = model(p.input_ids, *p.at, p.position_ids, p.segments)
        else:
            out = model(m.input_ids, *m.at)
        return out
