"""LoRA (arXiv 2106.09685) through peft: small matrices are trained beside frozen weights, and what leaves the
learner is merged.

Only the adapters have an optimiser, gradients and a place in checkpoints. Workers, exports and the likelihood
probes see whole weights `W + alpha / rank * B A`, so nothing outside the learner knows of adapters. B starts
at 0: with the starting adapters the policy is the base.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from services.common.errors import UserError
from services.common.loading.extras import needed_for
from trainer.config.learner import LoRASettings

if TYPE_CHECKING:
    from torch import Tensor, nn

_A, _B, _BASE = ".lora_A.default.weight", ".lora_B.default.weight", ".base_layer."


def add_adapters(hf: nn.Module, settings: LoRASettings) -> None:
    """Freeze the model and put adapters beside its linear layers. Raises EnvironmentLacks
    without peft, UserError where `learner.lora.targets` names no layer of the model, or experts."""
    with needed_for("learner.lora", "lora"):
        from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=settings.rank, lora_alpha=settings.alpha, target_modules=settings.targets, lora_dropout=0.0
    )
    try:
        inject_adapter_in_model(config, hf)
    except ValueError as e:
        raise UserError(
            f"learner.lora.targets={settings.targets}: no such linear layer in {type(hf).__name__}"
        ) from e
    names = {name for name, _ in hf.named_parameters()}
    if any(_B in name and name.replace(_B, f"{_BASE}weight") not in names for name in names):
        raise UserError(
            f"learner.lora.targets={settings.targets}: {type(hf).__name__} holds its experts in one tensor, "
            "whose adapters cannot be merged; name the layers of its attention: "
            "learner.lora.targets=[q_proj,k_proj,v_proj,o_proj]"
        )


def merged(weights: list[tuple[str, Tensor]], scale: float) -> Iterator[tuple[str, Tensor]]:
    """(plain name, whole weight) of a model with adapters, one layer at a time; sums in fp32, results in the
    weight's dtype."""
    adapters = dict(weights)
    for name, weight in weights:
        if not is_adapter(name):
            yield plain_name(name), merge(plain_name(name), weight.detach(), adapters.get, scale)


def is_adapter(name: str) -> bool:
    """Whether a parameter of a model with adapters belongs to one."""
    return name.endswith((_A, _B))


def plain_name(name: str) -> str:
    """A frozen parameter's name in the model without adapters."""
    return name.replace(_BASE, ".")


def merge(name: str, weight: Tensor, adapter: Callable[[str], Tensor | None], scale: float) -> Tensor:
    """`weight` with its adapter added, if it has one: adapter(NAME) gives A, B or None. scale: alpha /
    rank."""
    layer = name.removesuffix(".weight")
    a, b = adapter(layer + _A), adapter(layer + _B)
    if layer == name or a is None or b is None:
        return weight
    return (weight.float() + scale * (b.detach().float() @ a.detach().float())).to(weight.dtype)
