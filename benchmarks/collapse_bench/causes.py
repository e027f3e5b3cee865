"""The causes: what is wrong in training from step BEGINS on, or by the settings from the first step on.

Faults and settings are the barometer's, but for those that it lacks. Held-out evaluations meet none of them:
they ask what has become of the policy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.barometer import faults
from benchmarks.barometer.faults import Fault
from benchmarks.barometer.plan import KINDS

BEGINS = 13
"""First step of an injected fault."""


class InTraining(Fault):
    """A fault that is on while a batch for training is sampled, and off in evaluations."""

    @property
    def on(self) -> bool:
        return self.training and super().on


class SilentTool(InTraining, faults.SilentTool):
    pass


class EmptyDocuments(InTraining, faults.EmptyDocuments):
    pass


class NoisyRetriever(InTraining, faults.NoisyRetriever):
    pass


class LuckyGarbage(InTraining, faults.LuckyGarbage):
    pass


class Leak(InTraining, faults.Leak):
    pass


class ControlShock(InTraining, faults.ControlShock):
    pass


class Mismatch(faults.Mismatch):
    """The sampler has noisy weights for training, and the learner's for evaluations."""

    def __init__(self, seed: int, share: float = faults.Mismatch.SHARE) -> None:
        super().__init__(seed)
        self.SHARE = share
        self.clean: dict[str, torch.Tensor] = {}
        self.noisy: dict[str, torch.Tensor] = {}
        self.model: torch.nn.Module | None = None

    def engine(self, engine: Any, tokenizer: Any, settings: Any) -> None:
        self.model = engine._model

    def sent(self, weights: dict[str, torch.Tensor], version: int) -> dict[str, torch.Tensor]:
        self.clean, self.noisy = weights, super().sent(weights, version)
        return self.noisy

    def sampling(self, requests: Any) -> None:
        super().sampling(requests)
        if self.model is not None and self.clean:
            self.model.load_state_dict(self.noisy if self.training else self.clean, strict=False)


class Bf16Optimiser(Fault):
    """Weights and Adam's moments are rounded to bfloat16 after each optimiser step: there are no fp32 master
    weights."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.wrapped = False

    def updated(self, rank: Any) -> None:
        if self.wrapped or self.step + 1 < self.begins:
            return
        self.wrapped = True
        engine = rank.engine
        step = engine.step

        def rounded(lr: float) -> Any:
            done = step(lr)
            with torch.no_grad():
                for _, weight, moments in engine.iter_master():
                    for tensor in (weight, *moments.values()):
                        tensor.copy_(tensor.bfloat16())
            return done

        engine.step = rounded


@dataclass(frozen=True)
class Cause:
    """settings: dotted keys that differ from the base. share: size of the injected mismatch."""

    name: str
    says: str
    settings: dict[str, Any] = field(default_factory=dict)
    fault: type[Fault] = Fault
    share: float | None = None

    @property
    def begins(self) -> int:
        """First step at which something is wrong."""
        return 1 if self.fault is Fault else BEGINS

    def made(self, seed: int) -> Fault:
        """The fault of one cell."""
        fault = Mismatch(seed, self.share) if self.share is not None else self.fault(seed)
        fault.begins = BEGINS
        return fault


def _of_kind(name: str) -> dict[str, Any]:
    """The settings of the barometer's kind, without its lambda: that is the cure's."""
    return {k: v for k, v in KINDS[name].settings.items() if not k.startswith("algorithm.llds.")}


DOSES = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Sizes of the injected mismatch: noise as a share of each tensor's own spread."""
_ALL = (
    Cause("none", "nothing is wrong"),
    Cause("high_rate", "rate 3e-4, ten optimiser steps per batch", _of_kind("high_rate")),
    Cause("groups_of_two", "the same with twenty prompts in groups of two", _of_kind("groups_of_two")),
    Cause("stale_8", "rate 3e-4 on batches up to eight versions old", _of_kind("stale_8")),
    Cause("support_leak", KINDS["leak"].says, fault=Leak),
    Cause("mismatch", "noise of .4 on the sampler's weights", fault=Mismatch, share=0.4),
    Cause("noisy_retriever", KINDS["noisy_retriever"].says, fault=NoisyRetriever),
    Cause("silent_tool", KINDS["silent_tool"].says, fault=SilentTool),
    Cause("empty_documents", KINDS["empty_documents"].says, fault=EmptyDocuments),
    Cause("lucky_garbage", KINDS["lucky_garbage"].says, fault=LuckyGarbage),
    Cause("control_shock", KINDS["control_shock"].says, fault=ControlShock),
    Cause("bf16_optimiser", "weights and moments rounded to bfloat16", fault=Bf16Optimiser),
    *(
        Cause(f"mismatch_{dose:g}", f"noise of {dose:g} on the sampler's weights", fault=Mismatch, share=dose)
        for dose in DOSES
        if dose != 0.4
    ),
)
SECOND = (
    Cause(
        "exact",
        "nothing is wrong, and sampler and learner agree to the bit: both compute in float64",
        {"learner.dtype": "float64", "rollout.dtype": "float64"},
    ),
)
"""Of PLAN_SECOND.md."""
FIRST = {cause.name: cause for cause in _ALL}
"""Of PLAN.md."""
CAUSES: dict[str, Cause] = FIRST | {cause.name: cause for cause in SECOND}
BENCH = tuple(name for name in FIRST if not name.startswith("mismatch_"))
DOSE_CURVE = ("none", *("mismatch" if dose == 0.4 else f"mismatch_{dose:g}" for dose in DOSES))
CURVE = tuple(name for name in DOSE_CURVE if name not in BENCH)
"""The doses of PLAN_DOSE.md."""
GROUPS = {"all": BENCH, "dose": DOSE_CURVE, "second": tuple(cause.name for cause in SECOND), "curve": CURVE}
