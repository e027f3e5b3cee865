"""Attention over a packed sequence: causal inside each row, nothing between rows. Registered with
transformers as `NAME`.

On GPU it is PyTorch's variable-length flash attention (no mask is ever made, no padding is computed);
elsewhere, and in float32, each row goes through scaled_dot_product_attention by itself, which is the
reference that the tests compare with.
"""

from __future__ import annotations

import inspect
import logging
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from services.common.errors import UserError
from services.common.loading.quick_transformers import skip_scikit_learn
from trainer.learner.batches.micro_batches import Segments

log = logging.getLogger("trainer.learner")
NAME = "unspiral_packed"
_TRIED_TOKENS = 12
_UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias")
"""Arguments of models whose attention is not plain: they would be silently ignored."""


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    segments: Segments | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [B, H, T, D], key and value [B, Hkv, T, D] -> [B, T, H, D]. Without segments each of the B rows
    is one.

    Raises UserError for a model whose attention is more than causal: packed rows cannot compute it.
    """
    if extra := [name for name in _UNSUPPORTED if kwargs.get(name) is not None]:
        raise UserError(
            f"learner.packing=packed: {type(module).__name__} uses {', '.join(extra)}, which packed rows do "
            "not have; set learner.packing=padded"
        )
    if attention_mask is not None:
        raise UserError("learner.packing=packed takes no attention mask")
    if segments is None or len(segments.bounds) == 2:
        out = _rows(query, key, value, scaling)
    elif query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        out = flash(query, key, value, segments, scaling)
    else:
        parts = [
            _rows(query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], scaling)
            for a, b in pairwise(segments.bounds.tolist())
        ]
        out = torch.cat(parts, dim=2)
    return out.transpose(1, 2).contiguous(), None


def _rows(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped
    )


def flash(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None) -> Tensor:
    """PyTorch's variable-length kernel: query [1, H, T, D], key and value [1, Hkv, T, D] -> [1, H, T, D]."""
    kind = Kind(query.device, query.dtype, query.shape[1], key.shape[1], query.shape[3])
    if kind.heads > kind.key_heads and not takes_grouped(kind):
        groups = kind.heads // kind.key_heads
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    out = _kernel(_tokens_first(query), _tokens_first(key), _tokens_first(value), segments, scaling)
    return out.transpose(0, 1)[None]


def _kernel(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None) -> Tensor:
    """query [T, H, D], key and value [T, Hkv, D] -> [T, H, D]."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    # By PyTorch's version: everything to the left and nothing to the right, or the flag that said so before.
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if query.shape[1] != key.shape[1] and "enable_gqa" in known:
        options["enable_gqa"] = True
    bounds, longest = segments.bounds, segments.longest
    out = varlen_attn(query, key, value, bounds, bounds, longest, longest, scale=scaling, **options)
    assert isinstance(out, Tensor)  # it is a tuple only where log-sum-exps are asked for
    return out


class Kind(NamedTuple):
    """What decides whether a kernel takes grouped queries."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    key_heads: int
    size: int
    """Of a head."""


@lru_cache
def takes_grouped(kind: Kind) -> bool:
    """Whether the kernel takes fewer keys and values than queries, which are then never repeated. PyTorch
    2.11 has no argument for it and promises nothing, so that it is tried, once, on a few tokens: results and
    gradients have to be those of repeated keys and values."""
    draw = torch.Generator().manual_seed(0)
    groups = kind.heads // kind.key_heads
    bounds = torch.tensor([0, 5, _TRIED_TOKENS], dtype=torch.int32, device=kind.device)
    segments = Segments(bounds, _TRIED_TOKENS)
    heads = (kind.heads, kind.key_heads, kind.key_heads)
    query, key, value = (
        torch.randn(_TRIED_TOKENS, n, kind.size, generator=draw).to(kind.device, kind.dtype) for n in heads
    )

    def tried(repeats: int) -> list[Tensor]:
        given = [x.detach().requires_grad_() for x in (query, key, value)]
        with torch.enable_grad():
            keys, values = (x.repeat_interleave(repeats, dim=1) for x in given[1:])
            out = _kernel(given[0], keys, values, segments, None)
            return [out.detach(), *torch.autograd.grad(out.float().square().sum(), given)]

    try:
        grouped = tried(1)
    except torch.OutOfMemoryError:
        raise  # it says nothing about the kernel, and the answer is kept
    except (RuntimeError, ValueError) as e:
        log.info("learner: keys and values are repeated for their queries: %s", str(e).splitlines()[0])
        return False
    same = all(
        a.shape == b.shape
        and torch.allclose(a.float(), b.float(), rtol=0.02, atol=0.02 * float(b.abs().max()))
        for a, b in zip(grouped, tried(groups), strict=True)
    )
    if not same:
        log.info("learner: keys and values are repeated for their queries: the kernel ignores groups")
    return same


def _tokens_first(x: Tensor) -> Tensor:
    """[1, H, T, D] to [T, H, D], as the kernel reads it."""
    return x[0].transpose(0, 1).contiguous()


def register() -> str:
    """Make the attention known to transformers. Returns the name to load a model with."""
    skip_scikit_learn()
    from transformers import AttentionInterface

    # The compiler would trace the loop over rows anew for each number of them, and after the eighth not at
    # all. A decorator would load the compiler, for seconds, wherever this module is imported.
    AttentionInterface.register(NAME, torch.compiler.disable(attention))
    return NAME
