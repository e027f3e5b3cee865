"""Outcomes, statistics and power of the collapse study, against numbers worked out by hand."""

import math

import pytest

from benchmarks.collapse.judged.outcomes import first_half, outcomes, planned
from benchmarks.collapse.judged.power import detectable, power, study_spread
from benchmarks.collapse.judged.statistics import holm, interval, permutation_p, sign_flips

FLAT = dict.fromkeys(planned(), 0.5)


def series(rewards, **columns):
    """Rows from step 1; columns: a list by step, or a value for all."""
    return [
        {"step": i, "reward/mean": reward}
        | {
            key.replace("__", "/"): value[i - 1] if isinstance(value, list) else value
            for key, value in columns.items()
        }
        for i, reward in enumerate(rewards, 1)
    ]


# -- outcomes


def test_the_primary_outcome_is_the_mean_of_the_four_evaluations_from_step_60_on():
    sampled = dict(zip(planned(), [0.9, 0.9, 0.7, 0.5, 0.3, 0.1], strict=True))
    found = outcomes(series([1.0] * 150), sampled, FLAT)
    assert found.em == pytest.approx(0.4)
    assert found.fall == pytest.approx(0.8)
    assert found.em_greedy_end == 0.5
    assert (found.time_to_half, found.collapsed) == (150.0, False)


def test_evaluations_at_other_steps_do_not_count():
    found = outcomes(series([1.0] * 150), FLAT | {61: 0.0, 140: 0.0}, FLAT)
    assert found.em == 0.5


def test_a_missing_evaluation_makes_its_outcomes_undefined():
    without_90 = {step: em for step, em in FLAT.items() if step != 90}
    found = outcomes(series([1.0] * 150), without_90, FLAT)
    assert (found.em, found.fall, found.em_greedy_end) == (None, None, 0.5)
    without_30 = {step: em for step, em in FLAT.items() if step != 30}
    found = outcomes(series([1.0] * 150), without_30, {})
    assert (found.em, found.fall, found.em_greedy_end) == (0.5, None, None)


def test_a_run_that_died_scores_0_from_then_on():
    before = {step: 0.6 for step in planned() if step <= 100}
    found = outcomes(series([0.8] * 100), before, before, died=True)
    assert found.em == pytest.approx(0.3)  # .6 at 60 and 90, 0 at 120 and 150
    assert (found.fall, found.em_greedy_end) == (0.6, 0.0)
    # Mean rewards: .8 to step 100, then one eighth less per step: under .4 from step 105 on.
    assert (found.time_to_half, found.collapsed) == (105.0, True)


def test_a_run_that_was_cut_is_not_taken_for_dead():
    before = {step: 0.6 for step in planned() if step <= 100}
    assert outcomes(series([0.8] * 100), before, before).em is None


@pytest.mark.parametrize(
    ("rewards", "step"),
    [
        ([], None),
        ([0.5] * 150, None),
        ([0.0] * 150, None),
        ([1.0] * 19 + [0.0] * 20, 24),  # the mean of steps 17 to 24 is 3/8
        ([1.0] * 20 + [0.5] * 130, None),  # half is not under half
        ([1.0] * 19 + [0.0] * 12, 24),  # 8 low means: steps 24 to 31
        ([1.0] * 19 + [0.0] * 11, None),
        ([1.0] * 20 + [0.0] * 6 + [1.0] * 20 + [0.0] * 20, 51),
    ],
)
def test_the_first_step_under_half_of_the_best(rewards, step):
    assert first_half(rewards) == step


def test_a_fall_too_near_the_end_is_censored_and_a_missing_reward_counts_as_0():
    assert outcomes(series([1.0] * 141 + [0.0] * 9), FLAT, FLAT).time_to_half == 150.0
    assert outcomes(series([1.0] * 138 + [0.0] * 12), FLAT, FLAT).time_to_half == 143.0
    assert outcomes(series([1.0] * 138 + [None] * 12), FLAT, FLAT).time_to_half == 143.0


def test_gradient_norm_probe_and_window_means():
    found = outcomes(
        series(
            [1.0] * 150,
            grad_norm__max=[1.0] * 70 + [1000.0, None, float("nan")] + [2.0] * 77,
            probe__fixed=[None] * 5 + [-0.1] * 100 + [-0.5] * 35 + [-1.0] * 10,
            displacement__share_negative=[9.0] * 59 + [0.25] * 46 + [None] * 45,
            entropy=[9.0] * 59 + [0.2] * 91,
            rollout__searches=[None] * 105 + [2.0] * 45,
        ),
        FLAT,
        FLAT,
    )
    assert found.grad_norm == pytest.approx(3.0)
    assert found.nonfinite_steps == 2
    assert found.probe_fall == pytest.approx(0.9)
    assert found.share_falling == pytest.approx(0.25)  # 46 of the 91 steps have it
    assert found.entropy == pytest.approx(0.2)
    assert found.searches is None  # 45 of 91: fewer than half


def test_a_run_without_these_metrics_has_none_of_these_outcomes():
    found = outcomes(series([1.0] * 150), FLAT, FLAT)
    assert (found.grad_norm, found.probe_fall, found.share_falling, found.nonfinite_steps) == (None,) * 3 + (
        0,
    )
    assert outcomes([], {}, {}).em is None


# -- statistics


def test_the_sign_flips_are_all_there():
    assert sorted(map(tuple, sign_flips(2))) == [(-1, -1), (-1, 1), (1, -1), (1, 1)]
    assert sign_flips(10).shape == (1024, 10)
    with pytest.raises(ValueError, match="too many"):
        sign_flips(21)


@pytest.mark.parametrize(
    ("differences", "p"),
    [
        ([1.0, 2.0, 3.0], 2 / 8),  # only +++ and --- reach |6|
        ([1.0, 2.0, -3.0], 1.0),  # the sum is 0
        ([3.0, 2.0, -1.0], 4 / 8),  # |sum| 4: +++ 6, ++- 4, and their mirrors
        ([1.0, 1.0, 0.0], 4 / 8),  # a 0 doubles both counts
        ([0.0, 0.0], 1.0),
        ([0.1] * 10, 2 / 1024),
        ([0.1, 0.2, -0.1, 0.1], 8 / 16),  # .5 twice, .3 six times, with sums that round
        ([5.0], 1.0),
    ],
)
def test_the_permutation_test_by_hand(differences, p):
    assert permutation_p(differences) == pytest.approx(p)
    assert permutation_p([-d for d in differences]) == pytest.approx(p)


def test_no_pairs_have_no_p():
    assert math.isnan(permutation_p([]))


def test_the_interval_holds_the_mean_is_repeatable_and_turns_with_the_sign():
    data = [0.1, 0.3, 0.2, 0.25, 0.15, 0.05, 0.3, 0.2, 0.1, 0.35]
    low, high = interval(data)
    assert (low, high) == interval(data)
    assert 0.12 < low < 0.2 < high < 0.28
    # Its width is near that of the normal interval, 2 x 1.96 x the standard error.
    deviation = (sum((x - 0.2) ** 2 for x in data) / 10) ** 0.5
    assert high - low == pytest.approx(2 * 1.96 * deviation / 10**0.5, rel=0.1)
    mirrored = interval([-x for x in data])
    assert mirrored == (pytest.approx(-high, abs=0.01), pytest.approx(-low, abs=0.01))


def test_intervals_of_ties_and_of_too_few():
    assert interval([0.2, 0.2, 0.2]) == (0.2, 0.2)
    assert all(map(math.isnan, interval([0.2])))
    assert all(map(math.isnan, interval([])))


def test_holm_by_hand():
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06})
    assert holm({"a": 0.6, "b": 0.6}) == {"a": 1.0, "b": 1.0}
    assert holm({"a": 0.02, "b": 0.02, "c": 0.9}) == pytest.approx({"a": 0.06, "b": 0.06, "c": 0.9})
    found = holm({"a": 0.02, "b": math.nan})
    assert found["a"] == 0.02 and math.isnan(found["b"])
    assert holm({}) == {}


# -- power


def test_the_spread_is_that_of_the_study_page():
    # Middles: grpo .165 .21 .355, llds .55 .23 .475, so differences .385 .02 .12; ends: .51 -.06 .08.
    middle, last = study_spread()
    assert middle == pytest.approx(0.1887, abs=1e-4)
    assert last == pytest.approx(0.2970, abs=1e-4)


def test_without_an_effect_the_test_rejects_as_often_as_it_says():
    assert power(0.0) == pytest.approx(0.05, abs=0.012)
    assert power(5.0) == 1.0
    assert power(3.0, n=3) == 0.0  # three pairs can reject nothing: the smallest p is .25


def test_ten_pairs_detect_about_one_standard_deviation():
    assert detectable() == pytest.approx(1.0, abs=0.06)  # the paired t test: .996
