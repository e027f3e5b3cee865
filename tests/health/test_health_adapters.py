"""LLDS in the losses of other trainers: the golden vectors, a step in parts, and what each trainer logs."""

import json

import pytest
from places import ROOT

torch = pytest.importorskip("torch")

from tests.health.trainers import TRAINERS  # noqa: E402
from unspiral_health import LLDS  # noqa: E402

CASES = {c["name"]: c for c in json.loads((ROOT / "tests" / "data" / "golden.json").read_text())["cases"]}
KEYS = ["action/preserved", "action/all", "response/preserved", "token/all"]


def tensors(case):
    """The advantages are made small, so that the policy loss leaves LLDS's digits alone: signs are what it
    reads."""
    logp = torch.tensor(case["logp"], dtype=torch.float64, requires_grad=True)
    mask = (torch.tensor(case["action_ids"]) >= 0).double()
    old = torch.tensor(case["logp_old"], dtype=torch.float64)
    clean = [torch.where(mask > 0, x, 0.0) for x in (logp, old)]  # trainers keep 0 outside the mask
    return logp, *clean, 1e-30 * torch.tensor(case["advantages"]["grpo"], dtype=torch.float64), mask


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_golden_vectors_pass_through_each_adapters_loss(trainer, name, key, monkeypatch):
    case, want = CASES[name], CASES[name]["llds"][key]
    gate, denominator = key.split("/")
    llds = LLDS(1.0, gate=gate, denominator=denominator)
    without, with_llds = TRAINERS[trainer](monkeypatch, llds)
    leaf, logp, old, advantages, mask = tensors(case)
    added = with_llds(logp, old, advantages, mask)[0] - without(logp, old, advantages, mask)[0]
    (grad,) = torch.autograd.grad(added, leaf)
    count = max(want["count"], 1.0)
    expected = torch.tensor(want["grad_sum"], dtype=torch.float64) / count
    assert added.item() == pytest.approx(want["loss_sum"] / count, rel=1e-6, abs=1e-9)
    assert torch.allclose(grad, expected, rtol=1e-6, atol=1e-9)
    assert llds.seen.active_tokens == want["active_tokens"]
    assert llds.acts is (want["active_tokens"] > 0)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_micro_batches_add_up_to_means_of_their_rows_or_tokens(trainer, monkeypatch):
    """Each part brings its own mean, at its share of the step: nothing is counted twice or lost."""
    case = CASES["mixed"]
    llds = LLDS(0.5)
    without, with_llds = TRAINERS[trainer](monkeypatch, llds)
    _, logp, old, advantages, mask = tensors(case)
    total, expected = 0.0, 0.0
    for rows in (slice(0, 2), slice(2, 8)):
        part = (logp[rows], old[rows], advantages[rows], mask[rows])
        more = {"tokens": mask.sum()}
        added = with_llds(*part, **more)[0] - without(*part, **more)[0]
        total += added.item()
        alone = LLDS(0.5)(*part[:2], *part[2:]).item()
        by_tokens = trainer in ("verl", "openrlhf")
        share = (mask[rows].sum() / mask.sum()).item() if by_tokens else len(part[0]) / 8
        expected += share * alone
    assert total == pytest.approx(expected, rel=1e-6) and total > 0


@pytest.mark.parametrize("trainer", TRAINERS)
def test_each_trainer_logs_whether_llds_acts(trainer, monkeypatch):
    llds = LLDS(0.5)
    _, with_llds = TRAINERS[trainer](monkeypatch, llds)
    _, logp, old, advantages, mask = tensors(CASES["mixed"])
    said = with_llds(logp, old, advantages, mask)[1]
    found = {name[name.index("llds/") :] for name in said if "llds/" in name}
    assert {"llds/active_tokens", "llds/lambda", "llds/preserved_tokens"} <= found
    assert llds.report().startswith("LLDS acts: 25 active tokens")


def test_no_adapter_is_longer_than_sixty_lines():
    files = [ROOT / "unspiral_health" / "adapters" / f"{name}.py" for name in TRAINERS]
    assert {f.name: n for f in files if (n := len(f.read_text().splitlines())) > 60} == {}
