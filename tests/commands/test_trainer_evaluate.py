"""Held-out scores: exact numbers from made-up trajectories."""

from __future__ import annotations

import pytest

from services.contracts import Action, Question, Trajectory
from trainer.loop.rollouts.held_out import scores_of
from trainer.rewards import make_reward


def answered(source, text):
    question = Question("q", "who?", ("Ada Finch",), source)
    action = Action([1], [-0.5], 0, "answer", f"<answer> {text} </answer>")
    return Trajectory("u", "g", question, [1], [action], "answer")


MADE = [answered("nq", "Ada Finch"), answered("nq", "Ada"), answered("hotpotqa", "Finch Ada")]


def test_right_is_what_the_reward_function_calls_right_beside_exact_match():
    scores = scores_of(MADE, make_reward("f1"), 1.0)
    assert scores["overall"] == pytest.approx(
        {"em": 1 / 3, "f1": (1 + 2 / 3 + 1) / 3, "right": 2 / 3, "n": 3}
    )
    assert scores["sources"]["hotpotqa"] == {"em": 0.0, "f1": 1.0, "right": 1.0, "n": 1}
    assert scores_of(MADE, make_reward("f1"), 0.6)["sources"]["nq"]["right"] == 1.0


def test_what_has_no_reward_is_not_counted_and_without_any_nothing_is_said():
    assert scores_of(MADE, lambda t: 1.0 if t is MADE[0] else None, 1.0)["overall"]["right"] == 1.0
    assert set(scores_of(MADE, None, 1.0)["overall"]) == {"em", "f1", "n"}
