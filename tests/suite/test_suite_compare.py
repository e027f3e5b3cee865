"""Two evaluations, question by question."""

import json

import pytest
from command_line import run  # noqa: F401
from suite_rows import evaluation

from trainer.suite.compare import compare
from trainer.suite.finished import load

RIGHT = {
    "nq": [True, True, False, False],
    "triviaqa": [True, False],
    "popqa": [True],
    "hotpotqa": [False],
    "2wikimultihopqa": [False, False],
    "musique": [False],
    "bamboogle": [True],
}


@pytest.fixture
def pair(tmp_path):
    """B is right on two more questions of NQ and loses one of TriviaQA."""
    better = RIGHT | {"nq": [True] * 4, "triviaqa": [False, False]}
    return evaluation(tmp_path / "a", RIGHT), evaluation(tmp_path / "b", better, model="n")


def test_differences_are_paired_and_flipped_questions_are_named(pair):
    found = compare(*map(load, pair))
    nq = found["sets"]["nq"]
    assert (nq["first"], nq["second"], nq["difference"]["mean"]) == (0.5, 1.0, 0.5)
    assert (nq["better"], nq["worse"], nq["p"]) == (2, 0, 0.5)
    assert found["averages"]["general"]["difference"]["mean"] == pytest.approx(0.0)
    assert found["averages"]["macro"]["difference"]["mean"] == pytest.approx(0.0)
    micro = found["averages"]["micro"]
    assert (micro["better"], micro["worse"], micro["p"]) == (2, 1, 1.0)
    assert micro["difference"]["mean"] == pytest.approx(1 / 12)
    assert found["sets"]["musique"]["difference"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    assert [(f["key"], f["answers"]) for f in found["flipped"]] == [
        ("nq/q2", ["Oslo", "Rome"]),
        ("nq/q3", ["Oslo", "Rome"]),
        ("triviaqa/q0", ["Rome", "Oslo"]),
    ]
    assert found["warnings"] == []


def test_the_same_answers_have_the_same_intervals_in_whatever_order_they_came(pair):
    before = compare(*map(load, pair))
    answers = pair[1] / "answers.jsonl"
    answers.write_text("".join(reversed(answers.read_text().splitlines(keepends=True))))
    assert compare(*map(load, pair)) == before
    answers = pair[0] / "answers.jsonl"
    answers.write_text("".join(reversed(answers.read_text().splitlines(keepends=True))))
    assert compare(*map(load, pair)) == before


def test_the_command_prints_the_table_and_the_questions(run, pair):
    status, out, _ = run("eval", "compare", *map(str, pair), "--flips", "1")
    assert status == 0 and "NQ               4   0.500   1.000" in out
    assert "+0.500 (+0.000 to +1.000)       2      0     0.5" in out
    assert "  + nq/q2: question 2 of nq?\n      Oslo -> Rome   golden: Rome" in out
    assert "... and 1 more (--flips, --json)" in out and "TriviaQA: 1 differ" in out
    status, out, _ = run("eval", "compare", *map(str, pair), str(pair[0]), "--json", "--metric", "f1")
    assert status == 0 and [len(one["flipped"]) for one in json.loads(out)] == [3, 0]


def test_other_protocols_and_other_rows_are_warned_of(tmp_path, pair):
    fewer = evaluation(tmp_path / "c", RIGHT | {"nq": [True, True]}, top_k=5, chat_template="ab12")
    found = compare(load(pair[0]), load(fewer))
    assert found["n"] == 10
    assert found["warnings"] == [
        "protocol differs: top_k: 3 | 5",
        "protocol differs: chat_template: none | ab12",
        f"2 questions are left out, which only {pair[0]} has",
    ]


def test_between_methods_the_prompt_may_differ_and_the_model_length_may_not(tmp_path, pair):
    direct = evaluation(
        tmp_path / "d", RIGHT, method="direct", template="x", max_turns=0, top_k=None, max_response_tokens=9
    )
    retrieving = evaluation(tmp_path / "e", RIGHT, retriever={"backend": "bm25"}, max_response_tokens=8)
    assert compare(load(retrieving), load(direct))["warnings"] == [
        "protocol differs: max_response_tokens: 8 | 9"
    ]


def test_facts_that_no_retriever_told_are_warned_of(tmp_path):
    silent = {"backend": "unknown", "passages": "unknown", "corpus": "unknown", "encoder": "unknown"}
    a, b = (evaluation(tmp_path / name, RIGHT, retriever=silent) for name in "ab")
    told = evaluation(tmp_path / "c", RIGHT, retriever=silent | {"corpus": "4d48638ac914"})
    assert compare(load(a), load(b))["warnings"] == [
        "the retriever of neither told its backend, passages, corpus, encoder, which may differ"
    ]
    differs, unknown = compare(load(a), load(told))["warnings"]
    assert differs.startswith("protocol differs: retriever: ") and "corpus 4d48638ac914" in differs
    assert unknown == "the retriever of neither told its backend, passages, encoder, which may differ"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["a"], "eval compare: one evaluation given; expected `eval compare A B`, each what"),
        (
            ["a", "nowhere"],
            "nowhere: no such evaluation; expected what `unspiral eval` has kept: a folder with",
        ),
        (["a", "b", "--metric", "emm"], "--metric emm: accepted are em, f1, subem"),
    ],
)
def test_what_is_no_evaluation_is_refused(run, tmp_path, monkeypatch, pair, arguments, says):
    monkeypatch.chdir(tmp_path)
    status, _, err = run("eval", "compare", *arguments)
    assert status == 2 and says in err and err.count("\n") == 1


def test_an_unfinished_evaluation_says_how_to_go_on(run, pair):
    (pair[1] / "result.json").rename(pair[1] / "plan.json")
    status, _, err = run("eval", "compare", *map(str, pair))
    assert status == 2 and "has no result.json yet; the same `unspiral eval --suite` command goes on" in err
