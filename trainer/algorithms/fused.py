"""Log-probs and entropies straight from hidden states, without the logits of a whole sequence ever in memory.

`log softmax(hidden @ weight.T / temperature)` needs `[N, V]` logits: 5 GB in fp32 for 8k tokens and a
vocabulary of 152k, and autograd keeps several copies. Here the forward pass goes through blocks of tokens and
keeps three numbers per token. The backward pass makes the logits again in blocks of the *vocabulary*: each
block of the weight's gradient is then one matrix product over all tokens, written once, so that there is no
fp32 accumulator as large as the weight.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_OUTSIDE = -1e30
"""Logit of a masked id. It is finite, so that p * log p is 0 and not NaN, and exp of it is 0 in fp32 and
fp64."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    bias: Tensor | None = None,
    masked_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of each position under `softmax((hidden @ weight.T + bias) /
    temperature)`, in nats.

    hidden [N, D], weight [V, D], targets int64 [N] in 0..V-1, bias [V]; masked_ids int64 [M] are taken out of
    the softmax's support (a masked target has log-prob -inf and no gradient). About `chunk_tokens * V` logits
    exist at a time. Returns two tensors [N], fp32 for half-precision input (matrix products then accumulate
    in fp32 and are not rounded), otherwise of the input's dtype. Differentiable once, in hidden, weight and
    bias, through both results; a backward pass through the entropy costs a little more. Pass only the
    positions that count: each costs the same, whatever its weight in the loss.

    The backward pass reads `weight` itself (saved by reference), so its data may be swapped out and back in
    between, as DeepSpeed's ZeRO-3 does. Raises ValueError on shapes or dtypes that do not fit.
    """
    _check(hidden, weight, targets, temperature, bias)
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be >= 1, not {chunk_tokens}")
    ids = None if masked_ids is None else masked_ids.unique()  # sorted
    logp, entropy = _TokenLogprobs.apply(hidden, weight, targets, bias, ids, temperature, chunk_tokens)
    return _drop_masked_targets(logp, targets, masked_ids), entropy


def plain_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    bias: Tensor | None = None,
    masked_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same two results from full logits by autograd: the reference. `chunk_tokens` is not used.

    Half-precision logits are rounded by the matrix product, as in a trainer that calls the model's head."""
    _check(hidden, weight, targets, temperature, bias)
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits.to(_compute_dtype(hidden)) / temperature
    if masked_ids is not None:
        logits = logits.index_fill(1, masked_ids.to(logits.device), _OUTSIDE)
    all_logp = logits.log_softmax(-1)
    logp = all_logp.gather(1, targets[:, None])[:, 0]
    entropy = -(all_logp.exp() * all_logp).sum(-1)
    return _drop_masked_targets(logp, targets, masked_ids), entropy


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        bias: Tensor | None,
        masked_ids: Tensor | None,
        temperature: float,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        n = len(hidden)
        dtype = _compute_dtype(hidden)
        logp, entropy, lse = (torch.empty(n, dtype=dtype, device=hidden.device) for _ in range(3))
        device_ids = None if masked_ids is None else masked_ids.to(hidden.device)
        # `_matmul` chooses the precision of each product; autocast would round it.
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, n, chunk_tokens):
                rows = slice(start, start + chunk_tokens)
                logits = _logits(hidden[rows], weight, bias, temperature)
                if device_ids is not None:
                    logits.index_fill_(1, device_ids, _OUTSIDE)
                top = logits.amax(-1, keepdim=True)
                logits.sub_(top)
                probs = logits.exp()
                total = probs.sum(-1)
                log_total = total.log()
                logp[rows] = logits.gather(1, targets[rows, None])[:, 0] - log_total
                lse[rows] = top[:, 0] + log_total
                # Entropy is log sum exp minus the mean logit; both with the largest logit taken off, which
                # cancels.
                entropy[rows] = log_total - probs.mul_(logits).sum(-1) / total
                del logits, probs
        ctx.save_for_backward(hidden, weight, targets, bias, lse, entropy)
        ctx.masked_ids = masked_ids
        ctx.temperature = temperature
        ctx.chunk_tokens = chunk_tokens
        # A result that no loss uses then costs nothing in the backward pass.
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, bias, lse, entropy = ctx.saved_tensors
        want_hidden, want_weight, _, want_bias = ctx.needs_input_grad[:4]
        if grad_logp is None and grad_entropy is None:
            return None, None, None, None, None, None, None
        (n, v), t = (len(hidden), len(weight)), ctx.temperature
        g = torch.zeros_like(lse) if grad_logp is None else grad_logp / t
        ge = None if grad_entropy is None else (grad_entropy / t)[:, None]

        grad_hidden = torch.zeros_like(hidden, dtype=lse.dtype) if want_hidden else None
        grad_weight = torch.zeros_like(weight) if want_weight else None
        grad_bias = torch.zeros_like(bias) if want_bias and bias is not None else None
        ids = ctx.masked_ids
        host_ids = []
        if ids is not None:
            host_ids = ids.tolist()
            ids = ids.to(hidden.device)
        blocks = math.ceil(n / ctx.chunk_tokens)
        # About as many logits at a time as the forward pass makes: [n, width] for [chunk_tokens, v].
        width = 128 * math.ceil(v / (128 * blocks)) if blocks else v
        with torch.autocast(hidden.device.type, enabled=False):
            for a in range(0, v if blocks else 0, width):
                b = min(a + width, v)
                logits = _logits(hidden, weight[a:b], None if bias is None else bias[a:b], t)
                logits.sub_(lse[:, None])  # log-probs
                inside = (targets >= a) & (targets < b)
                # A target in another block is moved to the border of this one, where `inside` adds 0 for it.
                target = (targets - a).clamp(0, b - a - 1)[:, None]
                # With p = softmax and H the entropy: d logp[target] / d logit_j = 1[j = target] - p_j,
                # and d H / d logit_j = -p_j (log p_j + H). Below, minus the gradient is formed in place.
                if ge is None:
                    scale = -g[:, None]
                    minus = logits.exp_().scatter_add_(1, target, -inside.to(g.dtype)[:, None])
                else:
                    scale = -torch.ones_like(g)[:, None]
                    probs = logits.exp()
                    shift = (g + (ge[:, 0] * entropy))[:, None]
                    minus = torch.addcmul(shift, logits, ge, out=logits).mul_(probs)
                    minus.scatter_add_(1, target, torch.where(inside, -g, 0.0)[:, None])
                    del probs
                if host_ids:
                    # On the host: the length of a slice that a GPU finds has to be waited for.
                    low = bisect_left(host_ids, a)
                    high = bisect_left(host_ids, b)
                    minus.index_fill_(1, ids[low:high] - a, 0.0)
                if minus.dtype == hidden.dtype:
                    grad_logits = minus.mul_(scale)
                else:  # scale and round in one pass
                    grad_logits = torch.mul(minus, scale, out=torch.empty_like(minus, dtype=hidden.dtype))
                if grad_bias is not None:
                    grad_bias[a:b] = grad_logits.sum(0, dtype=lse.dtype)
                if grad_weight is not None:
                    grad_weight[a:b] = _matmul(grad_logits.t(), hidden)
                if grad_hidden is not None:
                    grad_hidden += _matmul(grad_logits, weight[a:b])
                del logits, minus, grad_logits
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, None, grad_bias, None, None, None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits = _matmul(hidden, weight.t())
    if bias is not None:
        logits += bias
    return logits if temperature == 1.0 else logits.div_(temperature)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, with an fp32 result for half-precision input: half-precision products must not be rounded before
    the softmax."""
    if a.dtype == _compute_dtype(a):
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()  # CPUs have no such product


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _drop_masked_targets(logp: Tensor, targets: Tensor, masked_ids: Tensor | None) -> Tensor:
    if masked_ids is None:
        return logp
    return logp.masked_fill(torch.isin(targets, masked_ids.to(targets.device)), -math.inf)


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, bias: Tensor | None) -> None:
    if (
        hidden.ndim != 2
        or weight.ndim != 2
        or hidden.shape[1] != weight.shape[1]
        or targets.shape != hidden.shape[:1]
    ):
        shapes = f"{tuple(hidden.shape)}, {tuple(weight.shape)}, {tuple(targets.shape)}"
        raise ValueError(f"hidden, weight, targets must be [N, D], [V, D], [N], not {shapes}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [V] = [{len(weight)}], not {tuple(bias.shape)}")
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden and weight must have one dtype, not {hidden.dtype} and {weight.dtype}")
    if not temperature > 0:
        raise ValueError(f"temperature must be > 0, not {temperature}")
