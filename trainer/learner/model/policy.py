"""The policy: a Hugging Face causal language model whose head gives log-probs and entropies instead of
logits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from services.common.errors import UserError
from services.common.loading.quick_transformers import skip_scikit_learn
from trainer.algorithms import token_logprobs
from trainer.config.learner import LoRASettings
from trainer.learner.batches.micro_batches import Segments
from trainer.learner.model import attention as packed_attention
from trainer.learner.model import lora
from trainer.learner.model.model_folder import check_model_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_ROW = 4
"""Tokens of a row that a packed model is tried with."""


class FusedHead(nn.Module):
    """The output embedding, called on hidden states [N, D] and targets [N]: log-probs and entropies [N],
    logits in blocks only.

    It holds the very parameters of the layer that it replaces, so tied embeddings stay tied and names stay
    the same."""

    def __init__(self, head: nn.Linear):
        super().__init__()
        self.weight = head.weight
        self.bias = head.bias

    def forward(self, hidden: Tensor, targets: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        return token_logprobs(hidden, self.weight, targets, bias=self.bias, **options)


class PolicyModel(nn.Module):
    """`forward` gives log-prob and entropy of chosen tokens at the sampling temperature.

    Only the positions asked for pass through the head: what is outside the action mask has no logits, hence
    no gradient there. Dropout is off, so that log-probs before and during the update are of the same
    function.
    """

    def __init__(
        self,
        hf: PreTrainedModel,
        *,
        temperature: float,
        chunk_tokens: int,
        masked_ids: list[int] | None = None,
    ) -> None:
        super().__init__()
        self.hf = hf
        head = hf.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise UserError(
                f"model.path: {type(hf).__name__} has no linear output head; the learner needs one"
            )
        _switch_off_dropout(hf)
        _check_plain_head(hf, head)
        hf.set_output_embeddings(FusedHead(head))
        self.temperature = temperature
        self.chunk_tokens = chunk_tokens
        self.lora_scale = 0.0
        """alpha / rank where the model has adapters, otherwise 0."""
        self.register_buffer(
            "masked_ids", torch.tensor(sorted(masked_ids)) if masked_ids else None, persistent=False
        )

    def forward(
        self,
        input_ids: Tensor,
        rows: Tensor,
        columns: Tensor,
        position_ids: Tensor | None = None,
        segments: Segments | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy [N], in nats, of the tokens at (rows, columns), each given all tokens to its
        left in its row.

        input_ids int64 [B, T] padded on the right; rows, columns int64 [N], columns >= 1. Causal attention
        never looks right, so no attention mask is needed and what stands in the padding does not matter. With
        segments: B = 1 and the rows lie end to end (trainer.learner.batches.micro_batches.Packed).
        """
        hidden = self.states(input_ids, position_ids, segments)
        head = self.hf.get_output_embeddings()
        targets = input_ids[rows, columns]
        return head(
            hidden[rows, columns - 1],
            targets,
            temperature=self.temperature,
            chunk_tokens=self.chunk_tokens,
            masked_ids=self.masked_ids,
        )

    def states(
        self, input_ids: Tensor, position_ids: Tensor | None = None, segments: Segments | None = None
    ) -> Tensor:
        """What the head reads: the last layer's states [B, T, D], after the final norm. The state at position
        t is the one from which token t + 1 is drawn."""
        packed = {} if segments is None else {"position_ids": position_ids, "segments": segments}
        hidden: Tensor = self.hf.base_model(input_ids=input_ids, use_cache=False, **packed).last_hidden_state
        return hidden

    def named_weights(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters that are trained, under their Hugging Face names, tied ones once. With LoRA: the
        adapters' alone."""
        return [(name, p) for name, p in self.hf.named_parameters() if p.requires_grad]

    def merged_weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights of a model with adapters, these added in, under the names of the model without them."""
        return lora.merged(list(self.hf.named_parameters()), self.lora_scale)

    def merged_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of `merged_weights`, which computes none of them."""
        return [
            (lora.plain_name(n), tuple(p.shape))
            for n, p in self.hf.named_parameters()
            if not lora.is_adapter(n)
        ]


def load_policy(
    path: str | Path,
    *,
    dtype: torch.dtype,
    temperature: float,
    chunk_tokens: int,
    packed: bool = False,
    **options: Any,
) -> PolicyModel:
    """The model of a folder, on the CPU. packed: for rows that lie end to end. options: of `prepare_policy`,
    whose errors it raises too."""
    skip_scikit_learn()
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = check_model_folder(path)
    attention = packed_attention.register() if packed else "sdpa"
    try:
        hf = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=dtype, attn_implementation=attention, local_files_only=True
        )
    except ValueError as e:
        if "attention implementation" not in str(e):
            raise
        raise UserError(
            f"model.path: {str(e).split()[0]} has attention of its own, which the learner does not compute"
        ) from e
    if packed:
        _check_packed(hf)
    return prepare_policy(PolicyModel, hf, temperature=temperature, chunk_tokens=chunk_tokens, **options)


def prepare_policy(
    kind: type[PolicyModel],
    hf: PreTrainedModel,
    *,
    gradient_checkpointing: bool = False,
    compiled: bool = False,
    adapters: LoRASettings | None = None,
    **options: Any,
) -> PolicyModel:
    """A policy of a class from a Hugging Face model. Raises UserError, and what `add_adapters`
    raises."""
    policy = kind(hf, **options)
    if adapters:
        lora.add_adapters(hf, adapters)
        policy.lora_scale = adapters.alpha / adapters.rank
    if compiled:
        for layer in hf.base_model.layers:
            layer.compile(dynamic=True)
    if gradient_checkpointing:
        # The reentrant form needs an input with a gradient, which a frozen embedding under LoRA does not
        # give.
        hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # Transformers computes activations again in training mode alone. (There is no dropout left that this
    # would switch on.)
    return policy.train()


def _switch_off_dropout(hf: nn.Module) -> None:
    # Scoring and training must be one function: otherwise an unmoved policy has a ratio other than 1.
    for module in hf.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout"):  # functional dropout keeps its rate as a number
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


@torch.no_grad()
def _check_packed(hf: PreTrainedModel) -> None:
    """Layers that carry a state from token to token (linear attention, convolutions) know nothing of packed
    rows: each would silently begin with the state of the row before. Raises UserError: of two equal rows end
    to end, the second gets other states than the first."""
    ids, ends = torch.arange(_ROW).repeat(2)[None], torch.arange(0, 2 * _ROW + 1, _ROW, dtype=torch.int32)
    states = hf.base_model(
        input_ids=ids, position_ids=ids, segments=Segments(ends, _ROW), use_cache=False
    ).last_hidden_state.float()
    first, second = states[0, :_ROW], states[0, _ROW:]
    if not torch.allclose(first, second, rtol=1e-2, atol=1e-2 * float(first.abs().max())):
        raise UserError(
            f"learner.packing=packed: {type(hf).__name__} has layers that do not know where a packed row "
            "ends; set learner.packing=padded"
        )


@torch.no_grad()
def _check_plain_head(hf: PreTrainedModel, head: nn.Linear) -> None:
    """Some models scale or cap their logits after the head. The fused head would silently compute another
    policy: refuse."""
    ids = torch.tensor([[0, 1, 2, 3]], device=head.weight.device)
    own = hf(input_ids=ids, use_cache=False).logits.float()
    plain = head(hf.base_model(input_ids=ids, use_cache=False).last_hidden_state).float()
    if not torch.allclose(own, plain, rtol=1e-3, atol=1e-3):
        raise UserError(
            f"model.path: {type(hf).__name__} changes its logits after the head (scaling or capping), which "
            "the learner does not do"
        )
