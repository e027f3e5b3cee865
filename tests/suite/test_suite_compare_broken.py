"""`eval compare` on files of answers that were cut, edited, doubled or made by another program."""

import json

import pytest
from command_line import run  # noqa: F401
from suite_rows import asked, row, trajectory_of

from trainer.commands.work.evaluate import keep_answers
from trainer.suite.compare import compare
from trainer.suite.finished import load
from trainer.suite.rows import METRICS


def rows(answers, source="quiz"):
    return [row(asked(source, number), answer) for number, answer in enumerate(answers)]


def write(file, lines, end="\n"):
    file.write_text("\n".join(json.dumps(line) for line in lines) + end)
    return file


@pytest.fixture
def good(tmp_path):
    return write(tmp_path / "good.answers.jsonl", rows(["Rome", "Oslo"]))


NO_ROWS = {
    "a score that is null": {"scores": dict.fromkeys(METRICS)},
    "a score in words": {"scores": dict.fromkeys(METRICS, "much")},
    "a score that is NaN": {"scores": dict.fromkeys(METRICS, float("nan"))},
    "a score beyond 1": {"scores": dict.fromkeys(METRICS, 1e308)},
    "scores in a list": {"scores": list(METRICS)},
    "an answer that is a number": {"answer": 5},
    "golden answers that are numbers": {"golden_answers": [1955, None]},
    "a sample that is a list": {"sample": [0]},
    "searches that are missing": {"searches": None},
    "half a pair of surrogates": {"answer": "\ud800"},
}


@pytest.mark.parametrize("what", NO_ROWS)
def test_a_row_that_eval_does_not_write_is_told_by_its_line(run, good, tmp_path, what):
    first, second = rows(["Rome", "Rome"])
    bad = write(tmp_path / "bad.answers.jsonl", [first, second | NO_ROWS[what]])
    expected = f"unspiral: {bad}, line 2: not a row of answers that `unspiral eval` writes\n"
    for pair in ((good, bad), (bad, good)):
        assert run("eval", "compare", *map(str, pair)) == (2, "", expected)


def test_a_whole_last_line_counts_without_its_line_break_and_a_torn_one_does_not(good, tmp_path):
    whole = write(tmp_path / "whole.answers.jsonl", rows(["Rome", "Rome"]), end="")
    assert compare(load(good), load(whole))["n"] == 2
    whole.write_text(whole.read_text()[:-9])
    found = compare(load(good), load(whole))
    assert (found["n"], found["warnings"][-1]) == (1, f"1 question is left out, which only {good} has")


def test_a_file_without_greedy_answers_is_told_so(run, good, tmp_path):
    none = write(tmp_path / "none.answers.jsonl", [], end="")
    sampled = write(tmp_path / "sampled.answers.jsonl", [one | {"sample": 1} for one in rows(["Rome"])])
    for file in (none, sampled):
        expected = f"unspiral: {file}: holds no greedy answer, which is compared\n"
        assert run("eval", "compare", str(good), str(file)) == (2, "", expected)


def test_questions_that_have_other_golden_answers_throughout_are_told_so(run, good, tmp_path):
    other = write(
        tmp_path / "b.answers.jsonl", [one | {"golden_answers": ["Roma"]} for one in rows(["Rome"])]
    )
    expected = (
        f"unspiral: {good} and {other}: no question is in both with the same words and golden answers; the "
        "first with others is quiz/q0\n"
    )
    assert run("eval", "compare", str(good), str(other)) == (2, "", expected)


@pytest.mark.parametrize("name", ["micro", "macro", "general", "multi_hop"])
def test_a_source_that_is_named_like_an_average_has_a_line_of_its_own(run, tmp_path, name):
    a = write(tmp_path / "a.answers.jsonl", rows(["Oslo", "Oslo"], name) + rows(["Oslo", "Oslo"]))
    b = write(tmp_path / "b.answers.jsonl", rows(["Rome", "Rome"], name) + rows(["Oslo", "Oslo"]))
    status, out, _ = run("eval", "compare", str(a), str(b))
    table = [line.split()[:4] for line in out.splitlines()[3:6]]
    assert status == 0
    assert table == [
        [name, "2", "0.000", "1.000"],
        ["quiz", "2", "0.000", "0.000"],
        ["Micro", "0.000", "0.500", "+0.500"],
    ]


def test_what_a_model_wrote_acts_on_no_terminal_and_floods_none(run, good, tmp_path):
    wild = [one | {"answer": "\x1b[31mred\x1b[2J\nnext " + "long " * 20_000} for one in rows(["", ""])]
    for one in wild:
        one["scores"] = dict.fromkeys(one["scores"], 0.0)
    file = write(tmp_path / "wild.answers.jsonl", wild)
    status, out, _ = run("eval", "compare", str(good), str(file))
    assert (status, "\x1b" in out) == (0, False)
    assert "Rome -> \ufffd[31mred\ufffd[2J next long" in out and max(map(len, out.splitlines())) < 400


def test_half_a_pair_of_surrogates_that_was_sampled_loses_no_answers(tmp_path):
    file = tmp_path / "kept.answers.jsonl"
    keep_answers(
        [trajectory_of(asked("quiz", 0), "Rome \ud800"), trajectory_of(asked("quiz", 1), "Rome")], file
    )
    assert [row["answer"] for row in load(file).greedy.values()] == ["Rome ?", "Rome"]
