"""Cures of others and controls for LLDS: values by hand, and against plain loops over tokens."""

import math
import random

import pytest
import torch
from test_algorithms_properties import batch

from trainer.algorithms import (
    chosen_tokens,
    kl_batch_start,
    llds_loss,
    mismatch_masks,
    nll_loss,
    policy_loss,
    token_lottery,
)

INF = math.inf
IDS = torch.tensor([[0, 0, -1, 1], [0, 0, 0, -1]])
OLD = torch.tensor([[-1.0, -2.0, 0.0, -1.0], [-0.5, -1.0, -2.0, 0.0]], dtype=torch.float64)
NEW = torch.tensor([[-1.5, -1.0, 0.0, -1.1], [-0.25, -3.0, -2.0, 0.0]], dtype=torch.float64)
RIGHT = torch.tensor([1.0, -1.0], dtype=torch.float64)
SEEDS = range(25)


def gradient(loss, logp):
    logp = logp.clone().requires_grad_()
    (found,) = torch.autograd.grad(loss(logp).loss_sum, logp)
    return found


def finite_difference(loss, logp, step=1e-6):
    out = torch.zeros_like(logp)
    for i in range(logp.shape[0]):
        for t in range(logp.shape[1]):
            up, down = logp.clone(), logp.clone()
            up[i, t] += step
            down[i, t] -= step
            out[i, t] = (loss(up).loss_sum - loss(down).loss_sum) / (2 * step)
    return out


# -- SAPO-search


def sapo_search(logp, logp_old, advantages, ids, below):
    """The conditional penalty on tokens of non-negative trajectories, token by token."""
    total, count = 0.0, 0
    for b, row in enumerate(ids.tolist()):
        for t, action in enumerate(row):
            if action < 0 or advantages[b] < 0:
                continue
            count += 1
            ratio = math.exp(logp[b, t] - logp_old[b, t])
            if ratio < below:
                total += float(logp_old[b, t] - logp[b, t])
    return total, count


@pytest.mark.parametrize("below", [1.0, 0.8, 0.5])
def test_sapo_search_is_llds_by_token_above_a_least_drop(below):
    for seed in SEEDS:
        x = batch(seed)
        wanted, count = sapo_search(x["logp"], x["logp_old"], x["advantages"], x["ids"], below)

        def loss(logp, x=x):
            return llds_loss(
                logp, x["logp_old"], x["advantages"], x["ids"], gate="token", min_drop=-math.log(below)
            )

        term = loss(x["logp"])
        assert term.loss_sum.item() == pytest.approx(wanted, rel=1e-12) and term.count == count
        held = (x["ids"] >= 0) & (x["advantages"] >= 0)[:, None]
        pulled = held & ((x["logp"] - x["logp_old"]).exp() < below)
        assert torch.equal(gradient(loss, x["logp"]), -pulled.double())


def test_sapo_search_by_hand():
    term = llds_loss(NEW, OLD, RIGHT, IDS, gate="token", min_drop=-math.log(0.8))
    assert (term.loss_sum.item(), term.count) == (pytest.approx(0.5), 3)  # e^-.1 = .905 is above .8


# -- NLL


def test_nll_by_hand_and_its_gradient():
    def loss(logp):
        return nll_loss(logp, IDS, preserved=RIGHT >= 0)

    term = loss(NEW)
    assert (term.loss_sum.item(), term.count) == (pytest.approx(1.5 + 1.0 + 1.1), 3)
    assert gradient(loss, NEW).tolist() == [[-1, -1, 0, -1], [0, 0, 0, 0]]
    assert nll_loss(NEW, IDS, preserved=RIGHT >= 0, denominator="all").count == 6
    weighed = nll_loss(NEW, IDS, answer_mask=IDS == 1, answer_weight=0.5).loss_sum
    assert weighed.item() == pytest.approx(1.5 + 1.0 + 0.55 + 0.25 + 3.0 + 2.0)


# -- the gate drawn by lot


def by_lot(logp, logp_old, advantages, ids, lottery):
    """As many tokens of each trajectory as LLDS-A would pull, those with the lowest lots."""
    total, pulled = 0.0, set()
    for b, row in enumerate(ids.tolist()):
        if advantages[b] < 0:
            continue
        places = [t for t, action in enumerate(row) if action >= 0]
        drops = {t: float(logp_old[b, t] - logp[b, t]) for t in places}
        fallen = {a: sum(drops[t] for t in places if row[t] == a) for a in {row[t] for t in places}}
        count = sum(fallen[row[t]] > 0 and drops[t] > 0 for t in places)
        for t in sorted(places, key=lambda t: float(lottery[b, t]))[:count]:
            total += drops[t]
            pulled.add((b, t))
    return total, pulled


def test_the_random_gate_pulls_as_many_tokens_as_llds_a_drawn_by_lot():
    differs = 0
    for seed in SEEDS:
        x = batch(seed)
        wanted, pulled = by_lot(x["logp"], x["logp_old"], x["advantages"], x["ids"], x["lottery"])

        def loss(logp, x=x):
            options = {"gate": "random", "lottery": x["lottery"]}
            return llds_loss(logp, x["logp_old"], x["advantages"], x["ids"], **options)

        term = loss(x["logp"])
        assert term.loss_sum.item() == pytest.approx(wanted, rel=1e-12)
        found = gradient(loss, x["logp"])
        assert {tuple(p) for p in torch.nonzero(found == -1).tolist()} == pulled
        assert (found == -1).sum() == term.stats["active_tokens"] and ((found == 0) | (found == -1)).all()
        plain = llds_loss(x["logp"], x["logp_old"], x["advantages"], x["ids"])
        assert (plain.stats["active_tokens"], plain.count) == (term.stats["active_tokens"], term.count)
        differs += not torch.equal(
            found, gradient(lambda p, x=x: llds_loss(p, x["logp_old"], x["advantages"], x["ids"]), x["logp"])
        )
    assert differs > len(SEEDS) / 2


def test_lots_depend_on_row_position_and_seed_alone_and_are_uniform():
    rows = torch.tensor([3, 0, 7])
    lots = token_lottery(rows, 500, seed=11)
    assert torch.equal(token_lottery(torch.tensor([7]), 200, seed=11)[0], lots[2, :200])
    assert not torch.equal(token_lottery(rows, 500, seed=12), lots)
    assert lots.min() >= 0 and lots.max() < 1 and len(set(lots.flatten().tolist())) == 1500
    assert abs(lots.mean() - 0.5) < 0.03 and abs(lots.var() - 1 / 12) < 0.01


# -- KL to the batch's start


def test_the_kl_to_the_batch_start_by_hand_is_two_sided():
    def loss(logp):
        return kl_batch_start(logp, OLD, IDS)

    d = [-0.5, 1.0, -0.1, 0.25, -2.0, 0.0]
    term = loss(NEW)
    assert term.loss_sum.item() == pytest.approx(sum(math.exp(x) - x - 1 for x in d)) and term.count == 6
    found = gradient(loss, NEW)
    assert found[IDS >= 0].tolist() == pytest.approx([math.exp(x) - 1 for x in d])  # falls and rises
    assert torch.allclose(found, finite_difference(loss, NEW), atol=1e-8)
    held = kl_batch_start(NEW, OLD, IDS, preserved=RIGHT >= 0)
    assert held.loss_sum.item() == pytest.approx(sum(math.exp(x) - x - 1 for x in d[:3])) and held.count == 3
    assert loss(OLD).loss_sum == 0 and (gradient(loss, OLD) == 0).all()


# -- clip-cov, kl-cov


def covariances(logp, advantages):
    mean_logp, mean_a = sum(logp) / len(logp), sum(advantages) / len(advantages)
    return [(p - mean_logp) * (a - mean_a) for p, a in zip(logp, advantages, strict=True)]


def choose(kind, logp, advantages, seed=0, **options):
    options = {"share": 0.2, "low": 1.0, "high": 5.0} | options
    generator = torch.Generator().manual_seed(seed)
    return chosen_tokens(
        kind, torch.tensor(logp), torch.tensor(advantages), generator=generator, **options
    ).tolist()


def test_kl_cov_chooses_the_largest_covariances_and_clip_cov_draws_from_a_band():
    rng = random.Random(5)
    for _ in SEEDS:
        n = rng.randint(1, 40)
        logp = [-3 * rng.random() for _ in range(n)]
        advantages = [rng.choice([-2.0, 0.0, 2.0]) for _ in range(n)]
        cov = covariances(logp, advantages)
        most = max(1, int(0.2 * n))
        largest = {i for i in sorted(range(n), key=lambda i: -cov[i])[:most] if cov[i] > 1e-6}
        found = {i for i, yes in enumerate(choose("kl_cov", logp, advantages)) if yes}
        assert {i for i in found if cov[i] > 1e-6} == largest
        band = {i for i in range(n) if 0.3 < cov[i] < 2.0}
        drawn = {i for i, yes in enumerate(choose("clip_cov", logp, advantages, low=0.3, high=2.0)) if yes}
        assert drawn <= band and len(drawn) == min(most, len(band))


def test_the_choice_of_clip_cov_is_repeatable_and_covers_its_band():
    logp, advantages = [-0.1, -0.1, -0.1, -3.0], [2.0, 2.0, 2.0, -2.0]
    draws = [tuple(choose("clip_cov", logp, advantages, seed, low=0.1)) for seed in range(40)]
    assert draws == [tuple(choose("clip_cov", logp, advantages, seed, low=0.1)) for seed in range(40)]
    # The last one's covariance, 6.5, is above the band.
    assert {draw.index(True) for draw in draws} == {0, 1, 2} and all(sum(draw) == 1 for draw in draws)


def policy(kind, logp, chosen=None, **options):
    options = {"clip_low": 0.2, "clip_high": 0.28} | options
    return policy_loss(kind, logp, OLD, RIGHT, IDS, chosen=chosen, **options)


def test_clip_cov_takes_the_chosen_tokens_out_and_keeps_them_in_the_count():
    chosen = torch.tensor([[True, False, True, False], [False, True, False, False]])

    def loss(logp):
        return policy("clip_cov", logp, chosen)

    # Kept: e^1 clipped to 1.28, e^-.1; of the wrong answer e^.25 (its push downwards is not clipped) and 1.
    wanted = -(1.28 + math.exp(-0.1) - math.exp(0.25) - 1.0)
    term = loss(NEW)
    assert term.loss_sum.item() == pytest.approx(wanted) and term.count == 6
    found = gradient(loss, NEW)
    assert found[0, 0] == found[0, 1] == found[1, 1] == 0
    assert torch.allclose(found, finite_difference(loss, NEW), atol=1e-7)
    assert term.stats["clipped_tokens"] == 3
    assert policy("clip_cov", NEW).loss_sum == policy("grpo", NEW).loss_sum


def test_kl_cov_penalises_the_chosen_tokens_and_clips_none():
    chosen = torch.tensor([[True, False, True, False], [False, True, False, False]])

    def loss(logp):
        return policy("kl_cov", logp, chosen, cov_kl=0.5)

    push = math.exp(-0.5) + math.exp(1.0) + math.exp(-0.1) - math.exp(0.25) - math.exp(-2.0) - 1.0
    term = loss(NEW)
    assert term.loss_sum.item() == pytest.approx(-push + 0.5 * (0.5 + 2.0)) and term.count == 6
    assert torch.allclose(gradient(loss, NEW), finite_difference(loss, NEW), atol=1e-7)
    assert gradient(loss, NEW)[0, 0].item() == pytest.approx(-math.exp(-0.5) - 0.5)
    assert term.stats["clipped_tokens"] == 0


# -- masks between sampler and learner


def masked(logp_old, logp_sampler, ids, geometric=None, token=None, outlier=None):
    out = []
    for b, row in enumerate(ids.tolist()):
        places = [t for t, action in enumerate(row) if action >= 0]
        ratios = {t: math.exp(float(logp_old[b, t] - logp_sampler[b, t])) for t in places}
        mean = math.exp(sum(map(math.log, ratios.values())) / max(1, len(places)))
        whole = geometric is None or geometric[0] <= mean <= geometric[1]
        whole = whole and (outlier is None or all(outlier[0] <= r <= outlier[1] for r in ratios.values()))
        kept = {t for t in places if whole and (token is None or token[0] <= ratios[t] <= token[1])}
        out.append([0.0 if t in ratios and t not in kept else 1.0 for t in range(len(row))])
    return out


@pytest.mark.parametrize(
    "bands",
    [
        {"geometric": (0.9, 1.1)},
        {"token": (0.6, 1.8)},
        {"outlier": (0.4, 2.2)},
        {"geometric": (0.8, 1.25), "token": (0.6, 1.8), "outlier": (0.4, 2.2)},
    ],
)
def test_masks_equal_plain_loops_and_stack(bands):
    dropped = 0
    for seed in SEEDS:
        x = batch(seed)
        got = mismatch_masks(
            x["logp_old"], x["logp_ref"], x["ids"], **{f"{name}_band": band for name, band in bands.items()}
        )
        assert got.tolist() == masked(x["logp_old"], x["logp_ref"], x["ids"], **bands)
        dropped += int((got == 0).sum())
    assert dropped > 20


def test_masks_by_hand_and_the_published_bands():
    sampler = OLD - torch.tensor([[0.02, 0.0, 0.0, 0.0], [math.log(3), -math.log(3), 0.0, 0.0]])
    bands = {"geometric_band": (0.99, 1.01), "token_band": (0.5, 2.0), "outlier_band": (1e-4, 100.0)}
    assert mismatch_masks(OLD, sampler, IDS, **bands).tolist() == [[1, 1, 1, 1], [0, 0, 1, 1]]
    far = sampler.clone()
    far[1, 2] = OLD[1, 2] - 5.0  # e^5 = 148 is an outlier
    assert mismatch_masks(OLD, far, IDS, outlier_band=(1e-4, 100.0)).tolist() == [[1] * 4, [0, 0, 0, 1]]
    with pytest.raises(ValueError, match="a band must lie around 1"):
        mismatch_masks(OLD, far, IDS, token_band=(1.1, 2.0))


# -- extremes

EXTREME = [-INF, -200.0, -1e-9]
CASES = {
    "nll": lambda new, old: nll_loss(new, IDS),
    "random": lambda new, old: llds_loss(
        new, old, RIGHT, IDS, gate="random", lottery=torch.linspace(0, 1, 8).view(2, 4)
    ),
    "batch_kl": lambda new, old: kl_batch_start(new, old, IDS),
    "clip_cov": lambda new, old: policy_loss(
        "clip_cov", new, old, RIGHT, IDS, clip_low=1.0, clip_high=1.0, chosen=IDS == 1
    ),
    "kl_cov": lambda new, old: policy_loss(
        "kl_cov", new, old, RIGHT, IDS, clip_low=0.2, clip_high=0.2, chosen=IDS == 0
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("new", EXTREME)
@pytest.mark.parametrize("old", EXTREME)
def test_log_probs_of_minus_infinity_give_a_finite_loss_and_gradient(name, new, old):
    logp, logp_old = torch.full((2, 4), new), torch.full((2, 4), old)
    term = CASES[name](logp, logp_old)
    assert math.isfinite(term.loss_sum)
    assert gradient(lambda p: CASES[name](p, logp_old), logp).isfinite().all()


def test_masks_of_impossible_tokens_drop_them_and_a_choice_passes_them_over():
    impossible = torch.full((2, 4), -INF)
    for old, sampler in ((impossible, OLD), (OLD, impossible), (impossible, impossible)):
        for band in ("geometric_band", "token_band", "outlier_band"):
            got = mismatch_masks(old, sampler, IDS, **{band: (0.5, 2.0)})
            assert torch.equal(got, torch.where(IDS >= 0, 0.0, 1.0).to(got.dtype))
    assert choose("kl_cov", [-INF, -1.0, -2.0], [1.0, 1.0, -1.0]) == [False, True, False]
    for kind in ("kl_cov", "clip_cov"):
        assert choose(kind, [-1.0], [1.0]) == [False]  # one token has no covariance
        assert choose(kind, [], []) == []
        assert choose(kind, [-1.0, -2.0], [0.0, 0.0]) == [False, False]
