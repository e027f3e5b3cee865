"""Every number of tests/data/golden.json: sums, counts and gradients of all losses, in float64 and
float32."""

import json

import pytest
import torch
from places import DATA

from trainer.algorithms import group_advantages, kl_k3, llds_loss, policy_loss

CASES = {c["name"]: c for c in json.loads((DATA / "golden.json").read_text())["cases"]}
RELATIVE = {torch.float64: 1e-9, torch.float32: 1e-5}
EXACT = dict(rtol=0, atol=0)


def _entries(section: str) -> list[tuple[str, str]]:
    return [(name, key) for name, case in CASES.items() for key in case[section]]


def _tensors(case: dict, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    out = {
        k: torch.tensor(case[k], dtype=dtype) for k in ("logp", "logp_old", "logp_ref", "importance_weights")
    }
    out["logp"].requires_grad_()
    out["action_ids"] = torch.tensor(case["action_ids"])
    out["answer_mask"] = torch.tensor(case["answer_mask"])
    return out


def _check(term, logp: torch.Tensor, want: dict) -> None:
    (grad,) = torch.autograd.grad(term.loss_sum, logp)
    tolerance = RELATIVE[logp.dtype]
    wanted_grad = torch.tensor(want["grad_sum"], dtype=torch.float64)
    assert term.count == want["count"] and isinstance(term.count, float)
    assert term.loss_sum.item() == pytest.approx(want["loss_sum"], rel=tolerance, abs=tolerance)
    assert torch.allclose(
        grad.double(), wanted_grad, rtol=tolerance, atol=tolerance * wanted_grad.abs().max().item()
    )
    assert ((grad == 0) == (wanted_grad == 0)).all()


@pytest.mark.parametrize("dtype", RELATIVE)
@pytest.mark.parametrize(("name", "kind"), _entries("advantages"))
def test_advantages(name, kind, dtype):
    case = CASES[name]
    got = group_advantages(torch.tensor(case["rewards"], dtype=dtype), torch.tensor(case["group_ids"]), kind)
    want = torch.tensor(case["advantages"][kind], dtype=torch.float64)
    assert got.dtype == dtype and torch.allclose(got.double(), want, rtol=RELATIVE[dtype], atol=0)


@pytest.mark.parametrize("dtype", RELATIVE)
@pytest.mark.parametrize(("name", "key"), _entries("policy"))
def test_policy_losses(name, key, dtype):
    case, want = CASES[name], CASES[name]["policy"][key]
    x = _tensors(case, dtype)
    term = policy_loss(
        key.removesuffix("+iw").removesuffix("_tight"),
        x["logp"],
        x["logp_old"],
        torch.tensor(case["advantages"][want["advantage"]], dtype=dtype),
        x["action_ids"],
        clip_low=want["clip_low"],
        clip_high=want["clip_high"],
        max_response_tokens=500,
        importance_weights=x["importance_weights"] if key.endswith("+iw") else None,
    )
    _check(term, x["logp"], want)


@pytest.mark.parametrize("dtype", RELATIVE)
@pytest.mark.parametrize(("name", "key"), _entries("llds"))
def test_llds(name, key, dtype):
    case, want = CASES[name], CASES[name]["llds"][key]
    x = _tensors(case, dtype)
    gate, denominator, *weight = key.split("/")
    options = (
        {"answer_mask": x["answer_mask"], "answer_weight": float(weight[0].split("=")[1])} if weight else {}
    )
    advantages = torch.tensor(case["advantages"]["grpo"], dtype=dtype)
    term = llds_loss(
        x["logp"], x["logp_old"], advantages, x["action_ids"], gate=gate, denominator=denominator, **options
    )
    _check(term, x["logp"], want)
    assert term.stats["active_tokens"] == want["active_tokens"]


@pytest.mark.parametrize("dtype", RELATIVE)
@pytest.mark.parametrize("name", CASES)
def test_kl(name, dtype):
    x = _tensors(CASES[name], dtype)
    _check(kl_k3(x["logp"], x["logp_ref"], x["action_ids"]), x["logp"], CASES[name]["kl_k3"])
