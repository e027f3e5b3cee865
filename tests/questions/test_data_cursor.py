"""The prompt cursor: passes, their order, and going on after a stop."""

import json
from collections import Counter
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT

from services.common.errors import UserError
from services.contracts import Question
from trainer.config.schema import load_config
from trainer.data import PromptCursor
from trainer.data.questions import load_questions


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


def test_a_resume_on_other_golden_answers_is_refused_unless_they_may_change():
    def corrected(**options):
        rows = [replace(q, golden_answers=("x", "y")) if q.id == "3" else q for q in questions(5)]
        return PromptCursor(rows, 1, True, **options)

    stopped = PromptCursor(questions(5), 1, True)
    stopped.take(7)
    state = json.loads(json.dumps(stopped.state_dict()))
    with pytest.raises(UserError, match=r"^data\.train: .* their golden answers are not: .*--allow-changed"):
        corrected().load_state_dict(state)
    allowed = corrected(may_change=frozenset({"data.train"}))
    allowed.load_state_dict(state)
    assert ids(allowed.take(5)) == ids(stopped.take(5)), "the same pass goes on"
    del state["answers"]  # of an earlier version
    corrected().load_state_dict(state)


def test_a_state_that_lacks_something_is_refused():
    cursor = PromptCursor(questions(5), 1, True)
    state = cursor.state_dict()
    del state["position"]
    with pytest.raises(UserError, match="lacks position"):
        cursor.load_state_dict(state)


def test_no_questions_are_refused():
    with pytest.raises(UserError, match="no questions"):
        PromptCursor([], 0, True)


def mixed(a=40, b=60):
    return [Question(f"{name}{i}", "q", ("x",), name) for name, n in (("a", a), ("b", b)) for i in range(n)]


def test_weights_say_how_often_a_pass_takes_a_source_and_passes_differ_in_the_part():
    cursor = PromptCursor(mixed(), 3, True, weights={"a": 2, "b": 0.5})
    passes = []
    for epoch in range(20):
        taken = ids(cursor.take(len(cursor._drawn(epoch))))
        assert cursor.epoch == epoch
        assert all(taken.count(f"a{i}") == 2 for i in range(40))
        part = [one for one in taken if one.startswith("b")]
        assert len(set(part)) == len(part)
        passes.append(part)
    assert sum(map(len, passes)) == pytest.approx(20 * 30, rel=0.1)
    assert len({frozenset(part) for part in passes}) == 20
    assert set().union(*passes) == {f"b{i}" for i in range(60)}, "all of the source come up in the end"


def test_weights_of_one_change_nothing_but_the_order_and_zero_leaves_a_source_out():
    whole = PromptCursor(mixed(), 3, True, weights={"a": 1})
    assert sorted(ids(whole.take(100))) == sorted(ids(mixed()))
    some = PromptCursor(mixed(), 3, False, weights={"b": 0})
    assert ids(some.take(41)) == [*ids(mixed(40, 0)), "a0"]


def test_a_resumed_run_keeps_its_weights_and_says_where_they_are_others():
    def made(weights, **options):
        return PromptCursor(mixed(), 5, True, weights=weights, **options)

    undisturbed = made({"a": 0.3})
    undisturbed.take(50)
    state = json.loads(json.dumps(undisturbed.state_dict()))
    resumed = made({"a": 0.3})
    resumed.load_state_dict(state)
    assert ids(resumed.take(200)) == ids(undisturbed.take(200))
    with pytest.raises(UserError, match=r"data\.weights: the run began with .*0\.3.* cannot go on with none"):
        made({}).load_state_dict(state)
    changed = made({"b": 2}, may_change=frozenset({"data.weights"}))
    changed.load_state_dict(state)
    assert (changed.epoch, changed.position) == (state["epoch"] + 1, 0)


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ({"c": 1}, r"data\.weights\.c: no such data source; accepted are a, b"),
        ({"a": 0, "b": 0}, "leave no question to train on"),
    ],
)
def test_weights_of_no_use_are_refused(weights, says):
    with pytest.raises(UserError, match=says):
        PromptCursor(mixed(), 0, True, weights=weights)


def test_the_recipe_of_the_papers_mixes_two_sources_of_one_parquet(tmp_path):
    """docs/data.md: the paper's configuration, with weights."""
    rows = [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": f"Use <search>. Question: {source} {i}?\n"}],
            "reward_model": {"style": "rule", "ground_truth": {"target": ["Rome"]}},
            "extra_info": {"split": "train", "index": i},
        }
        for source, n in (("nq", 30), ("hotpotqa", 40))
        for i in range(n)
    ]
    file = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist(rows), file)
    overrides = [f"data.train={file}", "data.weights={nq: 1, hotpotqa: 0.5}", "model.path=m"]
    config = load_config(ROOT / "examples" / "paper.yaml", overrides)
    loaded = load_questions(config.data.train).rows
    assert loaded[0].prompt == "Use <search>. Question: nq 0?\n"
    cursor = PromptCursor(loaded, config.seed, config.data.shuffle, weights=config.data.weights)
    sources = Counter()
    while cursor.epoch < 20:
        sources.update(q.data_source for q in cursor.take(1))
    assert sources["nq"] == pytest.approx(20 * 30, abs=2)
    assert sources["hotpotqa"] == pytest.approx(20 * 20, rel=0.1)
