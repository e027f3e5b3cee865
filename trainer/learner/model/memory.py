"""Whether activations are kept or computed again, and what happens where the estimate was wrong.

Without checkpointing the backward pass computes a third less; with it the activations of one layer exist at a
time. `learner.gradient_checkpointing: auto` keeps activations where they fit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainer.learner.model.policy import PolicyModel

KEPT_PER_LINEAR = 1.5
"""Bytes kept for each byte that goes into or comes out of a layer's linear maps: norms in float32, rotated
queries and keys, and the gate's product lie beside them. A 3.09 B Qwen2.5 kept 5.0 MB per token, of which its
linear maps account for 3.7."""
COMPUTED_AGAIN = "learner: activations are computed again in the backward pass"
SPARE = 0.08
"""Share of the device's memory that is left free, for the allocator's gaps and the kernels' own buffers."""


class Plan(NamedTuple):
    """The decision, and the reason in one line."""

    checkpointing: bool
    line: str

    def joined(self, of_any: bool) -> Plan:
        """The decision of all ranks: a rank that computed again alone would be the slowest."""
        if of_any == self.checkpointing:
            return self
        line = f"{COMPUTED_AGAIN}: another rank has no room for them (learner.gradient_checkpointing=auto)"
        return Plan(of_any, line)


def activation_bytes(policy: PolicyModel) -> int:
    """Of one token, kept by the decoder layers for the backward pass without checkpointing."""
    element = next(policy.parameters()).element_size()
    layers = policy.hf.base_model.layers
    through = sum(
        module.in_features + module.out_features
        for module in layers.modules()
        if isinstance(module, nn.Linear)
    )
    return int(KEPT_PER_LINEAR * element * through)


def head_bytes(policy: PolicyModel) -> int:
    """Of one block of logits in float32: values, their softmax and their gradient."""
    return 3 * 4 * policy.chunk_tokens * policy.hf.get_output_embeddings().weight.shape[0]


def plan(policy: PolicyModel, tokens: int, free: int, total: int, due: int) -> Plan:
    """For micro-batches of so many tokens, on a device with so many bytes free once the engine is built, of
    which gradients and optimiser will take `due`."""
    room = free - due - head_bytes(policy) - int(SPARE * total)
    needed = tokens * activation_bytes(policy)
    on = needed > room
    what = COMPUTED_AGAIN if on else "learner: activations are kept"
    return Plan(
        on,
        f"{what}: {tokens} tokens of a micro-batch need {needed / 2**30:.1f} GiB, "
        f"{max(room, 0) / 2**30:.1f} GiB are free (learner.gradient_checkpointing=auto)",
    )


def plan_for_device(policy: PolicyModel, tokens: int, device: torch.device, due: int) -> Plan:
    """On CPU activations are kept: host memory is not measured."""
    if device.type != "cuda":
        return Plan(False, "")
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return plan(policy, tokens, free, total, due)


def fits(policy: PolicyModel, forward: Callable[[], Tensor], due: int) -> bool:
    """Whether a forward and a backward pass find the memory they need, with the `due` bytes of gradients and
    optimiser set aside. Gradients go to the embedded tokens alone: no parameter is touched."""
    embedded: list[Tensor] = []
    embedding = policy.hf.get_input_embeddings()
    hook = embedding.register_forward_hook(lambda _module, _inputs, out: embedded.append(out))
    device = next(policy.parameters()).device
    try:
        aside = torch.empty(due, dtype=torch.uint8, device=device)
        with torch.enable_grad():
            total = forward().sum()
            if embedded and embedded[0].requires_grad:
                torch.autograd.grad(total, embedded[0])
        del aside
    except torch.OutOfMemoryError:
        return False
    finally:
        hook.remove()
    return True


def switch_on_checkpointing(policy: PolicyModel) -> None:
    """From the next forward pass on activations are computed again. Values and gradients stay the same."""
    policy.hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
