"""What holds for LLDS on any batch: where it acts, and by how much."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_algorithms_properties import GATES, SEEDS, batch, each_gate, evaluate, llds, many

from trainer.algorithms import llds_loss


@each_gate
@many()
@given(SEEDS)
def test_llds_is_0_while_the_policy_is_the_anchor(gate, seed):
    x = batch(seed)
    logp = x["logp"].requires_grad_()
    term = llds({**x, "logp_old": logp.detach()}, gate=gate)
    (grad,) = torch.autograd.grad(term.loss_sum, logp)
    assert (
        term.loss_sum == 0
        and (grad == 0).all()
        and term.stats["active_tokens"] == term.stats["active_actions"] == 0
    )


@each_gate
@many()
@given(SEEDS)
def test_llds_never_touches_rows_of_negative_advantage(gate, seed):
    x = batch(seed)
    wrong = x["advantages"] < 0
    loss, count, grad = evaluate(f"llds/{gate}/preserved", x)
    assert (grad[wrong] == 0).all()
    x["logp"] = torch.where(wrong[:, None], x["logp"] - 7, x["logp"])
    again = evaluate(f"llds/{gate}/preserved", x)
    assert torch.equal(loss, again[0]) and count == again[1] and torch.equal(grad, again[2])


@each_gate
@many()
@given(SEEDS, st.floats(0, 3))
def test_llds_is_one_sided_and_raising_a_log_prob_never_raises_it(gate, seed, rise):
    x = batch(seed)
    loss, _, grad = evaluate(f"llds/{gate}/preserved", x)
    assert loss >= 0 and ((grad == 0) | (grad == -1)).all()
    g = torch.Generator().manual_seed(seed)
    where = torch.rand(x["ids"].shape, generator=g) < 0.5
    higher, _, _ = evaluate(f"llds/{gate}/preserved", {**x, "logp": x["logp"] + rise * where})
    assert higher <= loss


@many(max_examples=100)
@given(
    SEEDS, st.sampled_from(GATES), st.sampled_from([0.0, 0.15]), st.sampled_from([1.0, 0.4]), st.booleans()
)
def test_llds_equals_plain_loops(seed, gate, min_drop, weight, choose):
    x = batch(seed)
    chosen = x["advantages"] > 0 if choose else None
    options = {"answer_mask": x["answer"], "answer_weight": weight} if weight != 1.0 else {}
    term = llds(x, gate=gate, min_drop=min_drop, preserved=chosen, **options)

    total, active, actions, kept = 0.0, 0, set(), 0
    for b, row in enumerate(x["ids"].tolist()):
        if not (x["advantages"][b] > 0 if choose else x["advantages"][b] >= 0):
            continue
        drops = [(x["logp_old"][b, t] - x["logp"][b, t]).item() for t in range(len(row))]
        drops = [0.0 if abs(d) <= min_drop else d for d in drops]
        for t, action in enumerate(row):
            if action < 0:
                continue
            kept += 1
            unit = {"token": [t], "response": [u for u, a in enumerate(row) if a >= 0]}.get(
                gate, [u for u, a in enumerate(row) if a == action]
            )
            if sum(drops[u] for u in unit) > 0 and drops[t] > 0:
                total += drops[t] * (weight if x["answer"][b, t] else 1.0)
                active += 1
                actions.add((b, action))
    assert term.loss_sum.item() == pytest.approx(total, rel=1e-12)
    assert (term.count, term.stats["active_tokens"], term.stats["active_actions"]) == (
        kept,
        active,
        len(actions),
    )


@pytest.mark.parametrize(("gate", "opened"), [("action", [0, 1]), ("response", [0, 1])])
def test_the_gate_opens_exactly_above_0(gate, opened):
    """Drops of +1/2 and -1/2 are exact in binary: the sum is 0 and the gate shut; one bit more and it
    opens."""
    ids, old = torch.tensor([[0, 0]]), torch.zeros(1, 2)
    for extra, is_open in zip((0.0, 2**-24), opened, strict=True):
        logp = torch.tensor([[-0.5 - extra, 0.5]])
        term = llds_loss(logp, old, torch.ones(1), ids, gate=gate)
        assert term.stats["active_tokens"] == is_open and (term.loss_sum > 0) == bool(is_open)
    assert llds_loss(torch.tensor([[-0.5, 0.5]]), old, torch.ones(1), ids, gate="token").loss_sum == 0.5


def test_gates_of_actions_do_not_mix_across_actions_or_rows():
    ids = torch.tensor([[0, -1, 1], [0, -1, 1]])
    drop = torch.tensor([[1.0, 9.0, -3.0], [-3.0, 9.0, 2.0]])
    by_action = llds_loss(-drop, torch.zeros(2, 3), torch.ones(2), ids)
    assert by_action.loss_sum == 3 and by_action.stats["active_actions"] == 2
    assert llds_loss(-drop, torch.zeros(2, 3), torch.ones(2), ids, gate="response").loss_sum == 0


def test_preserved_right_leaves_groups_that_learnt_nothing_alone():
    advantages, ids = torch.tensor([0.7, 0.0, -0.7]), torch.tensor([[0], [0], [0]])
    drop = torch.tensor([[1.0], [1.0], [1.0]])
    paper = llds_loss(-drop, torch.zeros(3, 1), advantages, ids)
    right = llds_loss(-drop, torch.zeros(3, 1), advantages, ids, preserved=advantages > 0)
    assert (paper.loss_sum, paper.count, right.loss_sum, right.count) == (2, 2, 1, 1)


def test_min_drop_ignores_the_noise_of_re_scoring():
    g = torch.Generator().manual_seed(0)
    old = torch.randn(8, 20, generator=g)
    noisy, ids = old + 1e-5 * torch.randn(8, 20, generator=g), torch.zeros(8, 20, dtype=torch.long)
    assert llds_loss(noisy, old, torch.ones(8), ids).stats["active_tokens"] > 20
    quiet = llds_loss(noisy, old, torch.ones(8), ids, min_drop=1e-4)
    assert quiet.loss_sum == 0 and quiet.stats["active_tokens"] == 0
    fallen = noisy - torch.nn.functional.one_hot(torch.tensor(3), 20) * 0.5
    assert llds_loss(fallen, old, torch.ones(8), ids, min_drop=1e-4).stats["active_tokens"] == 8
    quarter = (torch.tensor([[-0.25]]), torch.zeros(1, 1), torch.ones(1), torch.zeros(1, 1, dtype=torch.long))
    assert (
        llds_loss(*quarter, min_drop=0.25).loss_sum == 0
        and llds_loss(*quarter, min_drop=0.2).loss_sum == 0.25
    )
