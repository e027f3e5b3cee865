"""Held-out scores: exact numbers from made-up trajectories."""

from __future__ import annotations

import pytest

from services.contracts import Action, Observation, Question, Trajectory
from trainer.commands.work.in_words import overall_in_words, scores_in_words
from trainer.loop.rollouts.held_out import scores_of, with_behaviour
from trainer.rewards import make_reward


def answered(source, text):
    question = Question("q", "who?", ("Ada Finch",), source)
    action = Action([1], [-0.5], 0, "answer", f"<answer> {text} </answer>")
    return Trajectory("u", "g", question, [1], [action], "answer")


MADE = [answered("nq", "Ada Finch"), answered("nq", "Ada"), answered("hotpotqa", "Finch Ada")]

F1 = [make_reward("f1")(t) for t in MADE]
NONE = [None] * len(MADE)


def test_right_is_what_the_reward_function_calls_right_beside_exact_match():
    scores = scores_of(MADE, F1, 1.0)
    assert scores["overall"] == pytest.approx(
        {"em": 1 / 3, "f1": (1 + 2 / 3 + 1) / 3, "right": 2 / 3, "n": 3}
    )
    assert scores["sources"]["hotpotqa"] == {"em": 0.0, "f1": 1.0, "right": 1.0, "n": 1}
    assert scores_of(MADE, F1, 0.6)["sources"]["nq"]["right"] == 1.0


def test_what_has_no_reward_is_not_counted_and_without_any_nothing_is_said():
    assert scores_of(MADE, [1.0, *NONE[1:]], 1.0)["overall"]["right"] == 1.0
    assert set(scores_of(MADE, NONE, 1.0)["overall"]) == {"em", "f1", "n"}


def test_a_score_of_zero_says_how_often_it_searched_and_answered():
    question = Question("q", "who?", ("Ada Finch",), "nq")
    search = Action([1], [-0.5], 0, "search", "<search> a </search>", query="a", document_ids=[])
    rambling = Action([1], [-0.5], 0, "invalid", "I do not know")
    after = Action([1], [-0.5], 0, "answer", "<answer> Ada </answer>")
    searched = Trajectory("u", "g", question, [1], [search, Observation([2], "x"), after], "answer")
    silent = Trajectory("u", "g", question, [1], [rambling], "max_turns")
    made = [searched, silent, silent, answered("hotpotqa", "Ada")]
    scores = with_behaviour(scores_of(made, [None] * len(made), 1.0), made)
    assert scores["overall"] == pytest.approx(
        {"em": 0.0, "f1": 2 * (2 / 3) / 4, "n": 4, "searches": 1 / 4, "answered": 1 / 2}
    )
    assert scores["sources"]["nq"]["searches"] == pytest.approx(1 / 3)
    assert scores["sources"]["hotpotqa"]["answered"] == 1.0
    said = "EM 0.000  F1 0.333  (4 questions, 0.25 searches each, 50% answered)"
    assert overall_in_words(scores) == said
    assert scores_in_words(scores).splitlines()[-1] == f"overall   {said}"
    nothing = with_behaviour(scores_of([], [], 1.0), [])
    assert nothing["overall"]["searches"] == 0 and nothing["sources"] == {}


def test_what_the_reward_calls_right_is_told_beside_the_exact_match_where_they_differ():
    row = {"em": 0.5, "f1": 0.5, "n": 2, "searches": 1.0, "answered": 1.0}
    said = "EM 0.500  F1 0.500  (2 questions, 1.00 searches each, 100% answered"
    assert overall_in_words({"overall": row | {"right": 0.0}}) == f"{said}; by the run's reward 0% right)"
    assert overall_in_words({"overall": row | {"right": 0.5}}) == f"{said})"
