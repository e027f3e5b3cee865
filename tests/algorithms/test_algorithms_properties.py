"""What must hold for every loss on any batch."""

import functools
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.algorithm_names import Denominator, Gate, PolicyLossKind
from trainer.algorithms import entropy_bonus, kl_batch_start, kl_k3, llds_loss, nll_loss, policy_loss
from trainer.algorithms.terms import NOT_SUMMED, POLICY_STATS

POLICY_KINDS = get_args(PolicyLossKind)
GATES = tuple(gate for gate in get_args(Gate) if gate != "random")
SEEDS = st.integers(0, 2**32 - 1)
many = functools.partial(settings, max_examples=40, deadline=None, derandomize=True, database=None)


def batch(seed: int, rows: int | None = None) -> dict[str, torch.Tensor]:
    """Random trajectories: runs of action tokens with gaps between, some rows empty, all advantages' signs;
    float64."""
    g = torch.Generator().manual_seed(seed)
    b = int(torch.randint(1, 6, (), generator=g)) if rows is None else rows
    t = int(torch.randint(1, 14, (), generator=g))
    ids = torch.full((b, t), -1)
    for row in range(b):
        if b > 1 and torch.rand((), generator=g) < 0.15:
            continue  # an empty row
        at, action = int(torch.randint(0, 3, (), generator=g)), 0
        while at < t:
            length = int(torch.randint(1, 5, (), generator=g))
            ids[row, at : at + length] = action
            at, action = at + length + int(torch.randint(1, 3, (), generator=g)), action + 1
    old = -3 * torch.rand(b, t, generator=g, dtype=torch.float64)
    draw = functools.partial(torch.randn, b, t, generator=g, dtype=torch.float64)
    return {
        "logp": old + 0.4 * draw(),
        "logp_old": old,
        "logp_ref": old + 0.4 * draw(),
        "weights": torch.rand(b, t, generator=g, dtype=torch.float64) * 2,
        "answer": torch.rand(b, t, generator=g) < 0.3,
        "chosen": torch.rand(b, t, generator=g) < 0.3,
        "lottery": torch.rand(b, t, generator=g, dtype=torch.float64),
        "entropy": torch.rand(b, t, generator=g, dtype=torch.float64),
        "advantages": torch.randint(-1, 2, (b,), generator=g)
        * torch.rand(b, generator=g, dtype=torch.float64),
        "ids": ids,
    }


def llds(x, **options):
    return llds_loss(x["logp"], x["logp_old"], x["advantages"], x["ids"], **options)


def policy(kind, x, weights="weights"):
    return policy_loss(
        kind,
        x["logp"],
        x["logp_old"],
        x["advantages"],
        x["ids"],
        clip_low=0.2,
        clip_high=0.28,
        max_response_tokens=50,
        importance_weights=x[weights] if weights else None,
        chosen=x.get("chosen"),
    )


LOSSES = {
    **{kind: functools.partial(policy, kind) for kind in POLICY_KINDS},
    **{
        f"llds/{g}/{d}": functools.partial(llds, gate=g, denominator=d)
        for g in GATES
        for d in get_args(Denominator)
    },
    "llds/weighted": lambda x: llds(x, answer_mask=x["answer"], answer_weight=0.3),
    "llds/min_drop": lambda x: llds(x, min_drop=0.2),
    "llds/random": lambda x: llds(x, gate="random", lottery=x["lottery"]),
    "nll": lambda x: nll_loss(x["logp"], x["ids"]),
    "nll/preserved": lambda x: nll_loss(x["logp"], x["ids"], preserved=x["advantages"] >= 0),
    "batch_kl": lambda x: kl_batch_start(x["logp"], x["logp_old"], x["ids"]),
    "batch_kl/preserved": lambda x: kl_batch_start(
        x["logp"], x["logp_old"], x["ids"], preserved=x["advantages"] >= 0
    ),
    "kl": lambda x: kl_k3(x["logp"], x["logp_ref"], x["ids"]),
    "entropy": lambda x: entropy_bonus(x["logp"], x["ids"]),
}
each_loss = pytest.mark.parametrize("name", LOSSES)
each_gate = pytest.mark.parametrize("gate", GATES)


def evaluate(name: str, x: dict) -> tuple[torch.Tensor, float, torch.Tensor]:
    """Sum, count and gradient."""
    x = {**x, "logp": x["logp"].detach().requires_grad_()}
    term = LOSSES[name](x)
    (grad,) = torch.autograd.grad(term.loss_sum, x["logp"])
    return term.loss_sum.detach(), term.count, grad


@each_loss
@many()
@given(SEEDS)
def test_gradient_is_exactly_0_outside_the_mask_and_nan_there_changes_no_bit(name, seed):
    x = batch(seed)
    outside = x["ids"] < 0
    loss, count, grad = evaluate(name, x)
    assert (grad[outside] == 0).all()
    for poison in (torch.nan, torch.inf, -torch.inf):
        floats = ("logp", "logp_old", "logp_ref", "weights")
        poisoned = {k: v.masked_fill(outside, poison) if k in floats else v for k, v in x.items()}
        loss_p, count_p, grad_p = evaluate(name, poisoned)
        assert torch.equal(loss, loss_p) and count == count_p and torch.equal(grad, grad_p)


@each_loss
@many()
@given(SEEDS)
def test_order_of_rows_and_padding_leave_sums_unchanged(name, seed):
    x = batch(seed)
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x["ids"]), generator=g)
    t = x["ids"].shape[1]
    columns = torch.sort(torch.randperm(t + 4, generator=g)[:t]).values  # padding left, right and between

    def move(k: str, v: torch.Tensor) -> torch.Tensor:
        v = v[order]
        if v.ndim == 1:
            return v
        wide = torch.full((len(v), t + 4), -1 if k == "ids" else 0, dtype=v.dtype)
        wide[:, columns] = v
        return wide

    loss, count, grad = evaluate(name, x)
    loss_m, count_m, grad_m = evaluate(name, {k: move(k, v) for k, v in x.items()})
    assert count == count_m
    assert torch.allclose(loss, loss_m, rtol=1e-12, atol=1e-12)
    assert torch.allclose(grad[order], grad_m[:, columns], rtol=1e-12, atol=1e-12)


@each_loss
@many()
@given(SEEDS, st.integers(1, 4))
def test_any_split_of_a_batch_leaves_sum_count_and_gradient_unchanged(name, seed, size):
    x = batch(seed)
    loss, count, grad = evaluate(name, x)
    parts = [
        evaluate(name, {k: v[i : i + size] for k, v in x.items()}) for i in range(0, len(x["ids"]), size)
    ]
    assert sum(p[1] for p in parts) == count
    assert torch.allclose(sum(p[0] for p in parts), loss, rtol=1e-12, atol=1e-12)
    assert torch.allclose(torch.cat([p[2] for p in parts]), grad, rtol=1e-12, atol=1e-14)


@each_loss
@many()
@given(SEEDS)
def test_the_count_depends_on_mask_and_advantages_alone(name, seed):
    """The learner takes it from a call with all log-probs 0, before the first forward pass."""
    x = batch(seed)
    _, count, _ = evaluate(name, x)
    others = ("logp", "logp_old", "logp_ref", "weights", "entropy")
    blank = {k: torch.zeros_like(v) if k in others else v for k, v in x.items()}
    assert evaluate(name, blank)[1] == count


@each_loss
@many()
@given(SEEDS, st.integers(1, 4))
def test_stats_add_up_over_any_split_except_for_those_that_are_named(name, seed, size):
    x = batch(seed)
    whole = LOSSES[name](x).stats
    parts = [
        LOSSES[name]({k: v[i : i + size] for k, v in x.items()}).stats for i in range(0, len(x["ids"]), size)
    ]
    for key in whole.keys() - NOT_SUMMED:
        assert sum(part[key] for part in parts) == whole[key], key


@pytest.mark.parametrize("kind", POLICY_KINDS)
def test_every_policy_loss_has_the_stats_that_the_learner_reads(kind):
    x = batch(3, rows=4)
    stats = LOSSES[kind](x).stats
    assert set(POLICY_STATS) - stats.keys() == set()
    assert stats["action_tokens"] == (x["ids"] >= 0).sum()
    assert 0 <= stats["clipped_tokens"] <= stats["action_tokens"] and stats["ratio_max"] > 0


@each_loss
@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0), (3, 5)])
def test_an_empty_mask_gives_loss_0_count_0_and_a_finite_zero_gradient(name, shape):
    x = {k: torch.full(shape, torch.nan) for k in ("logp", "logp_old", "logp_ref", "weights")}
    x |= {
        "ids": torch.full(shape, -1),
        "answer": torch.ones(shape, dtype=torch.bool),
        "chosen": torch.ones(shape, dtype=torch.bool),
        "lottery": torch.ones(shape),
        "advantages": torch.ones(shape[0]),
    }
    loss, count, grad = evaluate(name, x)
    assert loss == 0 and count == 0 and grad.shape == shape and (grad == 0).all()


@each_loss
def test_a_single_token_row(name):
    x = {
        k: torch.tensor([[v]])
        for k, v in {"logp": -1.5, "logp_old": -1.0, "logp_ref": -1.0, "weights": 1.0}.items()
    }
    x |= {"ids": torch.tensor([[0]]), "answer": torch.tensor([[True]]), "advantages": torch.tensor([2.0])}
    x["lottery"] = torch.tensor([[0.5]])
    ratio = torch.tensor(-0.5).exp().item()
    objective = -2 * ratio
    wanted = {
        **dict.fromkeys(POLICY_KINDS, objective),
        **dict.fromkeys((k for k in LOSSES if k.startswith("llds")), 0.5),
        "cispo": 0.8 * 2 * 1.5,
        "llds/weighted": 0.5 * 0.3,
        "nll": 1.5,
        "nll/preserved": 1.5,
        "batch_kl": ratio - 1 + 0.5,
        "batch_kl/preserved": ratio - 1 + 0.5,
        "kl": torch.tensor(0.5).exp().item() - 1.5,
        "entropy": 1.5,
    }
    loss, count, _ = evaluate(name, x)
    assert loss.item() == pytest.approx(wanted[name], rel=1e-6)
    assert count == (50 if name == "dr_grpo" else 1)


@each_loss
@many(max_examples=15)
@given(SEEDS)
def test_float32_agrees_with_float64(name, seed):
    x = batch(seed)
    loss, count, _ = evaluate(name, x)
    single = {k: v.float() if v.is_floating_point() else v for k, v in x.items()}
    loss_s, count_s, _ = evaluate(name, single)
    assert count == count_s and loss_s.dtype == torch.float32
    assert loss_s.item() == pytest.approx(loss.item(), rel=1e-5, abs=1e-5)


@each_loss
def test_half_precision_log_probs_are_summed_in_fp32(name):
    x = {k: v.bfloat16() if v.is_floating_point() else v for k, v in batch(11, rows=5).items()}
    loss, _, grad = evaluate(name, x)
    wanted, _, _ = evaluate(name, {k: v.float() if v.is_floating_point() else v for k, v in x.items()})
    assert loss.dtype == torch.float32 and grad.dtype == torch.bfloat16
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)


@pytest.mark.parametrize("distance", [100.0, -100.0])
def test_k3_is_finite_and_flat_far_from_the_reference(distance):
    logp = torch.full((1, 3), -120.0, requires_grad=True)
    term = kl_k3(logp, logp.detach() + distance, torch.tensor([[0, 0, -1]]))
    (grad,) = torch.autograd.grad(term.loss_sum, logp)
    wanted = 2 * (torch.tensor(distance / 10).exp().item() - distance / 10 - 1)
    assert term.loss_sum.item() == pytest.approx(wanted, rel=1e-6) and (grad == 0).all()


@many()
@given(SEEDS)
def test_k3_is_never_negative_and_0_at_the_reference(seed):
    x = batch(seed)
    assert kl_k3(x["logp"], x["logp_ref"], x["ids"]).loss_sum >= 0
    assert kl_k3(x["logp"], x["logp"], x["ids"]).loss_sum == 0


@pytest.mark.parametrize("kind", POLICY_KINDS)
def test_no_gradient_reaches_old_log_probs_advantages_or_weights(kind):
    x = batch(3, rows=4)
    leaves = {k: x[k].requires_grad_() for k in ("logp", "logp_old", "advantages", "weights")}
    policy(kind, x).loss_sum.backward()
    assert [k for k, v in leaves.items() if v.grad is not None] == ["logp"]


@pytest.mark.parametrize("kind", POLICY_KINDS)
def test_an_advantage_of_0_gives_no_policy_gradient_and_keeps_its_tokens_in_the_count(kind):
    x = batch(5, rows=3)
    full = evaluate(kind, x)
    x["advantages"] = torch.zeros(3, dtype=torch.float64)
    x["chosen"] = torch.zeros_like(x["chosen"])  # without a covariance there is nothing to choose
    loss, count, grad = evaluate(kind, x)
    assert loss == 0 and (grad == 0).all() and count == full[1] > 0
    assert (evaluate("kl", x)[2] != 0).any()  # the KL to the reference still acts on such groups


@pytest.mark.parametrize("kind", POLICY_KINDS)
def test_a_weight_of_1_changes_no_bit_and_weights_change_no_count(kind):
    x = batch(7, rows=4)
    plain, weighted = policy(kind, x, weights=None), policy(kind, x)
    ones = policy(kind, {**x, "weights": torch.ones_like(x["weights"])})
    assert torch.equal(plain.loss_sum, ones.loss_sum) and plain.count == weighted.count
    assert not torch.equal(plain.loss_sum, weighted.loss_sum)


def test_clip_fraction_counts_the_tokens_without_gradient():
    log = torch.tensor([1.5, 1.1, 0.5, 0.9]).log()
    logp = torch.stack([log, log]).requires_grad_()
    term = policy_loss(
        "grpo",
        logp,
        torch.zeros(2, 4),
        torch.tensor([1.0, -1.0]),
        torch.zeros(2, 4, dtype=torch.long),
        clip_low=0.2,
        clip_high=0.2,
    )
    (grad,) = torch.autograd.grad(term.loss_sum, logp)
    assert (grad == 0).sum() == term.stats["clipped_tokens"] == 2 and term.stats["clip_fraction"] == 0.25
    assert term.stats["ratio_max"] == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: policy("ppo", x), "unknown policy loss 'ppo'; known: grpo, grpo_seq"),
        (
            lambda x: policy_loss(
                "dr_grpo", x["logp"], x["logp"], x["advantages"], x["ids"], clip_low=0.2, clip_high=0.2
            ),
            "dr_grpo needs",
        ),
        (lambda x: llds(x, gate="turn"), "unknown LLDS gate 'turn'; known: action, response, token"),
        (lambda x: llds(x, denominator="none"), "unknown LLDS denominator"),
        (lambda x: llds(x, min_drop=-1.0), "min_drop must be >= 0"),
        (lambda x: llds(x, answer_weight=0.5), "answer_weight needs answer_mask"),
        (lambda x: llds({**x, "advantages": x["logp"]}), r"expected \[B\]"),
        (lambda x: llds({**x, "logp_old": x["logp_old"][:1]}), r"expected \[B, T\]"),
        (lambda x: kl_k3(x["logp"], x["logp"], x["ids"][0]), r"action_ids must be \[B, T\]"),
    ],
)
def test_calls_that_make_no_sense_are_refused_with_what_is_accepted(call, message):
    with pytest.raises(ValueError, match=message):
        call(batch(1, rows=3))
