"""Evaluations of one's own questions side by side: what a plain `eval` has kept, and a suite beside it."""

import json

import pytest
from command_line import run  # noqa: F401
from suite_rows import evaluation, trajectory_of

from services.contracts import Question
from trainer.commands.work.evaluate import keep_answers
from trainer.suite.compare import compare
from trainer.suite.finished import load
from trainer.suite.rows import GREEDY, Asked
from trainer.suite.sets import Item, read_suite


def kept(file, answers, *, source="quiz", first=0, golden="Rome", ids="q"):
    """The file that `eval` keeps: of each question the answer, or None. first: the number of the first."""
    done = []
    for number, answer in enumerate(answers, first):
        question = Question(f"{ids}{number}", f"which town is {number}?", (golden,), source)
        done.append(trajectory_of(Asked(Item(question.id, source, question), GREEDY), answer))
    keep_answers(done, file)
    return file


@pytest.fixture
def own(tmp_path):
    """Two evaluations of four questions of one's own: the second is right on one more, and on one less."""
    a = kept(tmp_path / "a" / "answers.jsonl", ["Rome", "Rome", None, "Oslo"])
    b = kept(tmp_path / "b.answers.jsonl", ["Rome", "Oslo", "Rome", "Rome"])
    return a.parent, b


def test_own_questions_are_compared_in_pairs(own):
    found = compare(*map(load, own))
    assert found["n"] == 4 and list(found["sets"]) == ["quiz"] and list(found["averages"]) == ["micro"]
    quiz = found["sets"]["quiz"]
    assert (quiz["n"], quiz["first"], quiz["second"], quiz["better"], quiz["worse"]) == (4, 0.5, 0.75, 2, 1)
    assert quiz["difference"]["mean"] == 0.25 and quiz["difference"]["low"] < 0 < quiz["difference"]["high"]
    assert [(flip["key"], flip["answers"]) for flip in found["flipped"]] == [
        ("q1", ["Rome", "Oslo"]),
        ("q2", [None, "Rome"]),
        ("q3", ["Oslo", "Rome"]),
    ]
    assert found["warnings"] == [
        f"{own[0]} and {own[1]} keep no protocol (NAME.protocol.json beside the answers): whether both "
        "were asked in the same way (template, limits, retriever) is not checked"
    ]


def test_the_command_takes_a_folder_a_file_of_answers_and_the_scores_beside_it(run, own):
    scores = own[1].parent / "b.json"
    scores.write_text("{}")
    status, out, err = run("eval", "compare", str(own[0]), str(own[1]), "--flips", "1")
    assert (status, err) == (0, "")
    assert "quiz             4   0.500   0.750" in out and "Micro                0.500   0.750" in out
    assert "quiz: 3 differ\n  - q1: which town is 1?\n      Rome -> Oslo   golden: Rome" in out
    status, by_scores, _ = run("eval", "compare", str(own[0]), str(scores), "--flips", "1")
    assert status == 0 and by_scores == out.replace(str(own[1]), str(scores))


def test_rows_are_paired_by_their_question_where_the_files_number_them_otherwise(tmp_path):
    """Ids are row numbers in files that have none: the same question has another id in another file."""
    a = kept(tmp_path / "a.answers.jsonl", ["Rome", "Oslo", "Rome"])
    b = kept(tmp_path / "b.answers.jsonl", ["Oslo", "Rome"], first=1, ids="row")
    found = compare(load(a), load(b))
    assert (found["n"], found["sets"]["quiz"]["better"], found["sets"]["quiz"]["worse"]) == (2, 0, 0)
    assert found["warnings"][1:] == [f"1 question is left out, which only {a} has"]


def test_a_question_that_stands_twice_is_paired_twice(tmp_path):
    question = Question("q", "who?", ("Rome",), "quiz")
    both = []
    for name, answers in (("a", ["Rome", "Oslo"]), ("b", ["Rome", "Rome"])):
        asked = Asked(Item("q", "quiz", question), GREEDY)
        both.append(tmp_path / f"{name}.answers.jsonl")
        keep_answers([trajectory_of(asked, answer) for answer in answers], both[-1])
    found = compare(*map(load, both))
    assert (found["n"], [flip["key"] for flip in found["flipped"]]) == (2, ["q#2"])


def test_other_golden_answers_are_left_out_and_told(tmp_path):
    a = kept(tmp_path / "a.answers.jsonl", ["Rome", "Rome"])
    b = kept(tmp_path / "b.answers.jsonl", ["Rome"], golden="Roma")
    kept(tmp_path / "c.answers.jsonl", ["Rome"], first=1)
    b.write_text(b.read_text() + (tmp_path / "c.answers.jsonl").read_text())
    found = compare(load(a), load(b))
    assert found["n"] == 1
    assert found["warnings"][-1] == (
        "1 question has other words or golden answers: left out, the first is q0"
    )


def test_a_suite_and_a_plain_evaluation_of_its_questions(tmp_path):
    suite = evaluation(tmp_path / "suite", {"nq": [True, False]})
    rows = [json.loads(line) for line in (suite / "answers.jsonl").read_text().splitlines()]
    plain = tmp_path / "plain.answers.jsonl"
    for row in rows:
        row |= {"key": row["id"], "set": "searchR1_nq"}
    plain.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for pair in ((suite, plain), (plain, suite)):
        found = compare(*map(load, pair))
        assert (found["n"], list(found["sets"]), found["flipped"]) == (2, ["nq"], [])
        assert found["warnings"] == [
            f"{plain} keeps no protocol (NAME.protocol.json beside the answers): whether both were asked in "
            "the same way (template, limits, retriever) is not checked"
        ]


def test_a_source_has_the_same_interval_whatever_stands_beside_it(own, tmp_path):
    alone = compare(*map(load, own))["sets"]["quiz"]
    more = []
    for name, one in zip("cd", (own[0] / "answers.jsonl", own[1]), strict=True):
        other = kept(tmp_path / f"{name}.answers.jsonl", ["Rome", "Oslo"], source="nq", first=10)
        other.write_text(one.read_text() + other.read_text())
        more.append(other)
    beside = compare(*map(load, more))
    assert list(beside["sets"]) == ["nq", "quiz"] and beside["sets"]["quiz"] == alone


def test_what_cannot_be_compared_says_what_can(run, own, tmp_path):
    folder, file = own
    status, _, err = run("eval", "page", str(folder), "-o", str(tmp_path / "t.html"))
    assert status == 2 and err.count("\n") == 1
    assert "holds the answers of an `unspiral eval` without --suite" in err and "eval compare A B" in err
    (tmp_path / "x" / "eval").mkdir(parents=True)
    there = kept(tmp_path / "x" / "eval" / "answers.jsonl", ["Rome"])
    status, _, err = run("eval", "compare", str(tmp_path / "x"), str(file))
    assert status == 2 and err.endswith(f"or a file NAME.answers.jsonl; there is {there}\n")
    (tmp_path / "y.json").write_text("{}")
    status, _, err = run("eval", "compare", str(tmp_path / "y.json"), str(file))
    assert status == 2 and "y.json: no y.answers.jsonl beside it; expected" in err
    file.write_text('{"key": "q0", "sample": 0, "set": "quiz", "scores": {}}\n')
    status, _, err = run("eval", "compare", str(folder), str(file))
    assert status == 2 and "line 1: not a row of answers that `unspiral eval` writes" in err


def test_the_suite_sends_own_questions_to_the_plain_command(tmp_path):
    file = tmp_path / "held_out.jsonl"
    row = {"id": "1", "question": "who?", "golden_answers": ["Rome"], "data_source": "quiz"}
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(Exception) as refused:
        read_suite(file)
    assert str(refused.value).endswith(
        "data sets there: quiz; questions of your own go without --suite: `unspiral eval --data FILE` keeps "
        "each answer, and `unspiral eval compare` compares two such files"
    )
