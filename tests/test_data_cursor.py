"""The prompt cursor: passes, their order, and going on after a stop."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import UserError
from services.contracts import Question
from trainer.data import PromptCursor


def questions(n, text="q"):
    return [Question(str(i), f"{text}{i}", ("x",), "s") for i in range(n)]


def ids(taken):
    return [q.id for q in taken]


def test_each_pass_has_every_question_once_in_an_order_of_its_own():
    cursor = PromptCursor(questions(20), 3, True)
    passes = [ids(cursor.take(20)) for _ in range(3)]
    assert all(sorted(p, key=int) == ids(questions(20)) for p in passes)
    assert len({tuple(p) for p in passes}) == 3


def test_the_order_is_the_seeds_and_stays_what_it_was():
    assert ids(PromptCursor(questions(20), 3, True).take(30)) == ids(
        PromptCursor(questions(20), 3, True).take(30)
    )
    assert ids(PromptCursor(questions(20), 3, True).take(20)) != ids(
        PromptCursor(questions(20), 4, True).take(20)
    )
    assert ids(PromptCursor(questions(8), 0, True).take(16)) == PINNED, (
        "runs of earlier releases could not be resumed"
    )


PINNED = ["1", "3", "7", "6", "5", "4", "0", "2", "3", "6", "7", "5", "4", "2", "1", "0"]


def test_without_shuffling_the_files_order_is_kept():
    assert ids(PromptCursor(questions(3), 0, False).take(7)) == ["0", "1", "2", "0", "1", "2", "0"]


@given(
    st.integers(1, 9),
    st.booleans(),
    st.lists(st.integers(0, 25), min_size=1, max_size=6),
    st.lists(st.integers(0, 25), min_size=1, max_size=6),
)
def test_a_resumed_run_takes_the_prompts_of_an_undisturbed_one(n, shuffle, before, after):
    """prime-rl 3299, TRL 5911: step k+1"s batch is the same with and without a resume."""
    undisturbed = PromptCursor(questions(n), 5, shuffle)
    stopped = PromptCursor(questions(n), 5, shuffle)
    for size in before:
        assert ids(undisturbed.take(size)) == ids(stopped.take(size))
    resumed = PromptCursor(questions(n), 5, shuffle)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert resumed.state_dict() == undisturbed.state_dict()
    for size in after:
        assert ids(resumed.take(size)) == ids(undisturbed.take(size))


def test_how_a_batch_is_cut_does_not_change_the_order():
    a, b = PromptCursor(questions(7), 1, True), PromptCursor(questions(7), 1, True)
    assert ids(a.take(5) + a.take(0) + a.take(11)) == ids(b.take(16))


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (
            PromptCursor(questions(6), 1, True),
            "data.train: not the questions that the run began with (5 then, 6 now",
        ),
        (
            PromptCursor(questions(5, "other"), 1, True),
            "data.train: not the questions that the run began with (5 then, 5 now",
        ),
        (PromptCursor(questions(5)[::-1], 1, True), "data.train: not the questions"),
        (PromptCursor(questions(5), 2, True), "seed: the run began with 1 and cannot go on with 2"),
        (
            PromptCursor(questions(5), 1, False),
            "data.shuffle: the run began with True and cannot go on with False",
        ),
    ],
)
def test_a_resume_on_other_data_fails_in_one_line(other, says):
    state, before = PromptCursor(questions(5), 1, True).state_dict(), other.state_dict()
    with pytest.raises(UserError) as e:
        other.load_state_dict(state)
    assert says in str(e.value)
    assert "\n" not in str(e.value)
    assert other.state_dict() == before


def test_a_state_that_lacks_something_is_refused():
    cursor = PromptCursor(questions(5), 1, True)
    state = cursor.state_dict()
    del state["position"]
    with pytest.raises(UserError, match="lacks position"):
        cursor.load_state_dict(state)


def test_no_questions_are_refused():
    with pytest.raises(UserError, match="no questions"):
        PromptCursor([], 0, True)
