"""`config explain` says which values a key takes."""

from __future__ import annotations

import pytest

from trainer.config.explain import explain


@pytest.mark.parametrize(
    ("key", "accepted"),
    [
        ("algorithm.llds.gate", "action, response, token, random"),
        ("algorithm.llds.denominator", "preserved, all"),
        ("algorithm.llds.answer_weight", "off, paper, code"),
        ("algorithm.llds.min_drop", "auto, a number"),
        ("algorithm.llds.ratio_below", "above 0 and at most 1"),
        ("learner.lr", "above 0"),
        ("reward.concurrency", "1 to 1024"),
        ("rollout.workers", "all, a number at least 1"),
    ],
)
def test_words_and_limits_of_a_key_are_told(key, accepted):
    assert explain(key).splitlines()[-1] == f"    Accepted: {accepted}."


@pytest.mark.parametrize("key", ["run.name", "model.path", "reward.kind", "tracking.wandb"])
def test_a_key_that_takes_any_value_of_its_kind_has_no_such_line(key):
    assert "Accepted:" not in explain(key)
