"""The loss term for other trainers, and its check: it says that LLDS acts, or why it does not."""

import json
import logging

import pytest
from places import DATA

torch = pytest.importorskip("torch")

from services.common.errors import UserError  # noqa: E402
from unspiral_health import LLDS  # noqa: E402
from unspiral_health.llds import action_ids, llds_loss  # noqa: E402

GOLDEN = DATA / "golden.json"
MASK = torch.tensor([[1, 1, 0, 1, 1, 0], [0, 1, 1, 1, 0, 0]])


def rows(drop):
    """logp, old, advantages, mask: drop[b] is what each token of row b lost."""
    old = torch.full((2, 6), -1.0)
    logp = (old - torch.tensor(drop)[:, None]).requires_grad_()
    return logp, old, torch.tensor([1.0, -1.0]), MASK


def test_actions_are_the_unbroken_runs_of_the_mask():
    assert action_ids(MASK).tolist() == [[0, 0, -1, 1, 1, -1], [-1, 0, 0, 0, -1, -1]]
    for case in json.loads(GOLDEN.read_text())["cases"]:
        ids = torch.tensor(case["action_ids"])
        assert torch.equal(action_ids(ids >= 0), ids)


def test_the_term_is_lambda_times_the_mean_over_preserved_tokens():
    logp, old, advantages, mask = rows([0.5, 0.5])
    llds = LLDS(0.2)
    loss = llds(logp, old, advantages, mask)
    assert loss.item() == pytest.approx(0.2 * 0.5)
    whole = llds_loss(logp, old, advantages, action_ids(mask))
    assert loss.item() == pytest.approx(0.2 * whole.loss_sum.item() / whole.count)
    (grad,) = torch.autograd.grad(loss, logp)
    assert grad[0].tolist() == pytest.approx([-0.05, -0.05, 0, -0.05, -0.05, 0]) and grad[1].abs().sum() == 0
    wide = advantages[:, None].expand(2, 6) * mask  # one value per token, 0 outside the mask
    assert LLDS(0.2)(logp, old, wide, mask).item() == pytest.approx(loss.item())


def test_a_term_without_a_preserved_answer_is_nothing_rather_than_no_number():
    logp, old, _, mask = rows([0.5, 0.5])
    llds = LLDS(0.2)
    assert llds(logp, old, torch.tensor([-1.0, -0.5]), mask).item() == 0.0
    assert llds.report().endswith("no response has an advantage of at least 0")


def test_it_says_that_it_acts_once(caplog):
    caplog.set_level(logging.INFO)
    llds = LLDS(0.2)
    for _ in range(3):
        llds(*rows([0.5, 0.5]))
    assert llds.acts and llds.report() == (
        "LLDS acts: 12 active tokens, 100.0% of the preserved; gate by action, 1.5 actions per response; old "
        "log-probs from before the update in 3 of 3 calls"
    )
    assert [r.message[:10] for r in caplog.records] == ["LLDS acts:"]
    assert llds.metrics["llds/active_tokens"] == 4 and llds.metrics["llds/lambda"] == 0.2


@pytest.mark.parametrize(
    ("drop", "options", "reason"),
    [
        ([0.0, 0.0], {}, "the log-probs equal the old ones in every call"),
        ([-0.5, 0.5], {}, "no preserved action lost likelihood by more than min_drop, 0 nats"),
        ([0.01, 0.0], {"min_drop": 0.1}, "lost likelihood by more than min_drop, 0.1 nats"),
        ([0.5, 0.5], {"lam": 0.0}, "lambda is 0"),
    ],
)
def test_it_warns_where_it_does_nothing_and_says_why(drop, options, reason, caplog):
    llds = LLDS(**options)
    for _ in range(63):
        llds(*rows(drop))
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING and not llds.acts
    assert warning.message.startswith("LLDS does nothing (after 16 calls): ") and reason in warning.message


def test_old_log_probs_that_are_no_old_ones_are_refused():
    logp, _, advantages, mask = rows([0.5, 0.5])
    with pytest.raises(UserError, match="no log-probs from before the update are kept"):
        LLDS()(logp, None, advantages, mask)
    with pytest.raises(UserError, match="logp_old has a gradient"):
        LLDS()(logp, logp * 1.0, advantages, mask)
    with pytest.raises(UserError, match="lam: expected a number of at least 0"):
        LLDS(float("nan"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"logp": torch.full((2, 6), -1.5)}, "logp has no gradient, so nothing would be trained"),
        ({"logp_old": torch.full((2, 5), -1.0)}, r"logp_old: expected \[2, 6\] as logp has, got \[2, 5\]"),
        ({"mask": MASK[:, :4]}, r"mask: expected \[2, 6\] as logp has, got \[2, 4\]"),
    ],
)
def test_what_can_train_nothing_or_does_not_fit_is_refused(change, said):
    given = dict(zip(("logp", "logp_old", "advantages", "mask"), rows([0.5, 0.5]), strict=True))
    with pytest.raises(UserError, match=said):
        LLDS(0.2)(**given | change)


@pytest.mark.parametrize("lam", ["0.2", True, None, float("nan")])
def test_a_lambda_that_is_no_number_is_refused(lam):
    with pytest.raises(UserError, match="lam: expected a number of at least 0"):
        LLDS(lam)


def test_log_probs_that_are_no_numbers_are_told_once(caplog):
    logp, old, advantages, mask = rows([0.5, 0.5])
    llds = LLDS(0.2)
    for _ in range(2):
        loss = llds(torch.where(torch.arange(6) == 1, torch.nan, logp), old, advantages, mask)
        assert loss.isfinite()
    assert [r.message for r in caplog.records if "not finite" in r.message] == [
        "LLDS: 2 log-probs are not finite, and are left out: does the model diverge?"
    ]


def test_an_evaluation_is_no_sign_that_it_acts():
    llds = LLDS()
    with torch.no_grad():
        assert llds(*rows([0.5, 0.5])).item() > 0
    assert llds.seen.calls == 0 and llds.report().endswith("the trainer's loss never called it")


def test_lambda_comes_from_the_environment(monkeypatch):
    assert LLDS.from_environment().lam == 0.2
    monkeypatch.setenv("UNSPIRAL_LLDS_LAMBDA", "0.35")
    assert LLDS.from_environment().lam == 0.35
    monkeypatch.setenv("UNSPIRAL_LLDS_LAMBDA", "strong")
    with pytest.raises(UserError, match="UNSPIRAL_LLDS_LAMBDA: expected a number, got 'strong'"):
        LLDS.from_environment()
