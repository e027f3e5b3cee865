"""The fused log-prob path gives the numbers of full logits, and never holds them."""

import itertools
import math

import pytest
import torch

from trainer.algorithms.fused import plain_token_logprobs, token_logprobs

N, D, V = 37, 16, 300
MASKED = torch.tensor([299, 3, 128])


def _inputs(dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, V, (N,), generator=g)
    targets[torch.isin(targets, MASKED)] = 7
    draw = {"hidden": (N, D), "weight": (V, D), "bias": (V,)}
    tensors = {
        k: torch.randn(shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
        for k, shape in draw.items()
    }
    return {**tensors, "targets": targets}


def _results(function, dtype, *, with_bias, use, **options) -> list[torch.Tensor]:
    """[logp, entropy, and the gradients] for a random weighting of logp, entropy or both."""
    x = _inputs(dtype)
    bias = x["bias"] if with_bias else None
    logp, entropy = function(x["hidden"], x["weight"], x["targets"], bias=bias, **options)
    a, b = torch.randn(2, N, generator=torch.Generator().manual_seed(5), dtype=logp.dtype)
    loss = (a * logp).sum() * (use != "entropy") + (b * entropy).sum() if use != "logp" else (a * logp).sum()
    leaves = [x["hidden"], x["weight"], *([bias] if with_bias else [])]
    return [logp.detach(), entropy.detach(), *torch.autograd.grad(loss, leaves)]


def _close(got: list[torch.Tensor], want: list[torch.Tensor], relative: float) -> None:
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b.double()).abs().max() <= relative * b.double().abs().max()


@pytest.mark.parametrize(("dtype", "relative"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
@pytest.mark.parametrize("chunk_tokens", [1, 5, 37, 1024])
@pytest.mark.parametrize("use", ["logp", "entropy", "both"])
def test_values_and_gradients_equal_those_of_full_logits(dtype, relative, chunk_tokens, use):
    for with_bias, temperature, masked in itertools.product((False, True), (1.0, 0.7), (None, MASKED)):
        options = {"with_bias": with_bias, "use": use, "temperature": temperature, "masked_ids": masked}
        got = _results(token_logprobs, dtype, chunk_tokens=chunk_tokens, **options)
        _close(got, _results(plain_token_logprobs, dtype, **options), relative)


def test_gradients_pass_gradcheck_in_float64():
    g = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(s, generator=g, dtype=torch.float64, requires_grad=True) for s in ((5, 3), (7, 3), (7,))
    )
    targets = torch.tensor([0, 6, 2, 2, 5])

    def run(h, w, b):
        return token_logprobs(
            h, w, targets, temperature=1.3, chunk_tokens=2, bias=b, masked_ids=torch.tensor([4])
        )

    assert torch.autograd.gradcheck(run, (hidden, weight, bias))


def test_half_precision_input_is_computed_in_fp32():
    x = _inputs(torch.bfloat16)
    logp, entropy = token_logprobs(x["hidden"], x["weight"], x["targets"], chunk_tokens=8)
    exact = plain_token_logprobs(x["hidden"].double(), x["weight"].double(), x["targets"])
    assert logp.dtype == entropy.dtype == torch.float32
    _close([logp, entropy], list(exact), 1e-6)
    grads = torch.autograd.grad(logp.sum(), [x["hidden"], x["weight"]])
    wanted = torch.autograd.grad(exact[0].sum(), [x["hidden"], x["weight"]])
    assert [g.dtype for g in grads] == [torch.bfloat16] * 2
    _close(list(grads), list(wanted), 0.01)


def test_temperature_scales_logits_not_log_probs():
    """Dividing log-probs by the temperature is wrong: they no longer sum to one."""
    x = _inputs(torch.float64)
    logits = (x["hidden"] @ x["weight"].T).detach()
    by_hand = [
        logits[n, t] / 0.5 - math.log(sum(math.exp(z / 0.5) for z in logits[n].tolist()))
        for n, t in enumerate(x["targets"])
    ]
    logp, _ = token_logprobs(x["hidden"], x["weight"], x["targets"], temperature=0.5)
    assert torch.allclose(logp, torch.stack(by_hand), rtol=1e-12)


def test_masked_ids_leave_the_support():
    x = _inputs(torch.float64)
    others = [i for i in range(V) if i not in MASKED.tolist()]
    position = torch.tensor([others.index(t) for t in x["targets"].tolist()])
    logp, entropy = token_logprobs(x["hidden"], x["weight"], x["targets"], masked_ids=MASKED, chunk_tokens=10)
    small = plain_token_logprobs(x["hidden"], x["weight"][others], position)
    _close([logp, entropy], list(small), 1e-13)
    (grad,) = torch.autograd.grad((logp + entropy).sum(), x["weight"])
    assert (grad[MASKED] == 0).all() and (grad[others].abs().sum(1) > 0).all()


@pytest.mark.parametrize("function", [token_logprobs, plain_token_logprobs])
def test_a_masked_target_has_log_prob_minus_infinity_and_no_gradient(function):
    x = _inputs(torch.float64)
    targets = x["targets"].clone()
    targets[3] = MASKED[0]
    logp, entropy = function(x["hidden"], x["weight"], targets, masked_ids=MASKED)
    assert (
        logp[3] == -math.inf
        and torch.isfinite(logp[torch.arange(N) != 3]).all()
        and torch.isfinite(entropy).all()
    )
    (grad,) = torch.autograd.grad(logp.sum(), x["hidden"])
    assert (grad[3] == 0).all() and torch.isfinite(grad).all()


def test_zero_ranks_swap_of_the_weight_between_forward_and_backward():
    """ZeRO-3 frees the parameter's data after forward and brings it back, elsewhere, before backward."""
    x = _inputs(torch.float32)
    hidden, weight = x["hidden"].detach(), torch.nn.Parameter(x["weight"].detach().clone())
    (wanted,) = torch.autograd.grad(plain_token_logprobs(hidden, weight, x["targets"])[0].sum(), weight)
    logp, _ = token_logprobs(hidden, weight, x["targets"], chunk_tokens=8)
    data, weight.data = weight.data.clone(), torch.empty(0)
    assert logp.grad_fn.saved_tensors[1] is weight  # no copy is kept: its memory is free now
    weight.data = data
    logp.sum().backward()
    _close([weight.grad], [wanted], 1e-5)


def test_no_tensor_as_large_as_the_full_logits_is_made():
    sizes = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(
                o.numel() for o in (out if isinstance(out, tuple) else (out,)) if isinstance(o, torch.Tensor)
            )
            return out

    n, v, chunk = 64, 1024, 8
    hidden, weight = torch.randn(n, 4, requires_grad=True), torch.randn(v, 4, requires_grad=True)
    with Watch():
        logp, entropy = token_logprobs(hidden, weight, torch.zeros(n, dtype=torch.long), chunk_tokens=chunk)
        (logp.sum() + entropy.sum()).backward()
    assert max(sizes) == chunk * v and len(sizes) > 50


def test_no_positions_give_empty_results_and_zero_gradients():
    weight = torch.randn(V, D, requires_grad=True)
    hidden = torch.zeros(0, D, requires_grad=True)
    logp, entropy = token_logprobs(hidden, weight, torch.zeros(0, dtype=torch.long), masked_ids=MASKED)
    assert logp.shape == entropy.shape == (0,)
    (logp.sum() + entropy.sum()).backward()
    assert (weight.grad == 0).all() and hidden.grad.shape == (0, D)


def test_a_frozen_head_gets_no_gradient_and_works_under_no_grad():
    x = _inputs(torch.float32)
    head = x["weight"].detach()
    logp, _ = token_logprobs(x["hidden"], head, x["targets"])
    logp.sum().backward()
    assert x["hidden"].grad is not None and head.grad is None
    with torch.no_grad():
        again, _ = token_logprobs(x["hidden"], head, x["targets"])
    assert torch.equal(again, logp) and not again.requires_grad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(3, 5)}, r"\[N, D\], \[V, D\], \[N\]"),
        ({"targets": torch.zeros(4, dtype=torch.long)}, r"\[N, D\], \[V, D\], \[N\]"),
        ({"weight": torch.zeros(6, 4, dtype=torch.float64)}, "one dtype"),
        ({"bias": torch.zeros(5)}, r"bias must be \[V\] = \[6\]"),
        ({"temperature": 0.0}, "temperature must be > 0"),
        ({"chunk_tokens": 0}, "chunk_tokens must be >= 1"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change, message):
    good = {
        "hidden": torch.zeros(3, 4),
        "weight": torch.zeros(6, 4),
        "targets": torch.zeros(3, dtype=torch.long),
    }
    with pytest.raises(ValueError, match=message):
        token_logprobs(**{**good, **change})
