"""The configuration's section `learner`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from services.settings import Settings
from trainer.config.used_with import UsedWith

Beta = Annotated[float, Field(ge=0, lt=1)]


NUMBERS = {2: "two", 3: "three"}


class LoRASettings(Settings):
    """Train small matrices beside frozen weights (arXiv 2106.09685). Rollout workers and exports get merged
    weights."""

    rank: int = Field(16, ge=1)
    """Rank of the matrices."""
    alpha: float = Field(32.0, gt=0)
    """Their product is scaled by alpha / rank."""
    targets: Literal["all-linear"] | list[str] = "all-linear"
    """Layers that get them: all linear ones but the output head, or those whose names end so (q_proj,
    v_proj)."""


class LearnerSettings(Settings):
    """The optimiser side."""

    ranks: int = Field(1, ge=1)
    """Data-parallel learner ranks."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """DeepSpeed ZeRO stage."""
    lr: float = Field(1e-6, gt=0)
    """Learning rate of AdamW."""
    warmup_steps: int = Field(0, ge=0)
    """Optimiser steps of linear warm-up."""
    warmup_batches: int = Field(0, ge=0)
    """Batches of linear warm-up; all optimiser steps of a batch have one rate. Schedules that step once per
    rollout batch count in this unit. Excludes warmup_steps."""
    warmup_share: float = Field(0.0, ge=0, lt=1)
    """Linear warm-up over this share of the run's batches (`trainer.steps`). Excludes the other two."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up, by batches up to `trainer.steps`: it stays, or falls to
    `schedule_floor` in a line or half a cosine."""
    schedule_floor: Annotated[float, UsedWith("schedule", "linear", "cosine")] = Field(0.0, ge=0, le=1)
    """Share of `lr` that is left at the last batch."""
    match_kl: str | None = None
    """Folder (or metrics.jsonl) of a run whose `kl/old` the step size follows: the learning rate of each
    batch is scaled so that the update moves the policy as far as that run's did at the same step."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """AdamW's betas."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's weight decay."""
    minibatches_per_batch: int = Field(2, ge=1)
    """Parts into which a batch of trajectories is divided; one optimiser step each."""
    epochs: int = Field(1, ge=1)
    """Passes over the batch; optimiser steps per batch are minibatches_per_batch x epochs."""
    tokens_per_microbatch: int = Field(16384, ge=1)
    """Most tokens, padding included, of one forward pass of a rank."""
    packing: Literal["auto", "padded", "packed"] = "auto"
    """How rows of different lengths share a forward pass: `packed`, end to end without padding; `padded`,
    each filled up to the longest. `auto` is packed on GPU."""
    logit_chunk_tokens: int = Field(1024, ge=1)
    """Positions whose logits exist at the same time."""
    grad_clip: float = Field(1.0, gt=0)
    """Largest global gradient norm."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Compute type: `auto` is float32 on CPU, bfloat16 (fp32 master weights) on GPU. `float64`, with the same
    `rollout.dtype`, makes sampler and learner agree to the bit; one rank, zero_stage 0."""
    gradient_checkpointing: bool | Literal["auto"] = False
    """Recompute activations in the backward pass, to save memory. `auto`: on GPU where they would not fit, by
    their estimated size or, up to zero_stage 2, by a try before each step with a micro-batch larger than any
    before; never on CPU. With `auto` and `false`, up to zero_stage 2, a step that runs out of memory is taken
    again with it, and it stays on."""
    compile: bool = False
    """Compile the decoder layers (torch.compile): faster after a minute's start, with less memory for
    activations. Not with zero_stage 3."""
    offload_optimizer: bool = False
    """Keep fp32 master weights and Adam's moments in host memory, and step there, which is slower. One rank
    with zero_stage 1 then takes 6 bytes per parameter on GPU instead of 20. Needs zero_stage >= 1."""
    lora: LoRASettings | None = None
    """Train LoRA adapters instead of all weights. Not with zero_stage 3."""
    start_timeout_seconds: float = Field(600.0, gt=0)
    """Longest wait for the ranks to come up (the first start compiles an extension of DeepSpeed)."""
    step_timeout_seconds: float = Field(3600.0, gt=0)
    """Longest wait for one scoring pass or update."""

    @model_validator(mode="after")
    def _stage_fits(self) -> LearnerSettings:
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError(
                "learner.offload_optimizer=true needs learner.zero_stage 1, 2 or 3; stage 0 has nothing to "
                "offload"
            )
        given = [
            f"learner.{name}"
            for name in ("warmup_steps", "warmup_batches", "warmup_share")
            if getattr(self, name)
        ]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are {NUMBERS[len(given)]} units of one warm-up; set one")
        if self.dtype == "float64" and (self.zero_stage or self.ranks > 1 or self.lora):
            raise ValueError(
                "learner.dtype=float64 needs learner.ranks=1, learner.zero_stage=0 and no learner.lora: "
                "DeepSpeed reduces and divides no float64 gradients, and adapters are added in float32"
            )
        for option in ("lora", "compile"):
            if getattr(self, option) and self.zero_stage == 3:
                raise ValueError(f"learner.{option} does not work with learner.zero_stage=3; set 1 or 2")
        return self

    @property
    def optimiser_steps_per_batch(self) -> int:
        return self.minibatches_per_batch * self.epochs
