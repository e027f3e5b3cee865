"""Question files that are odd, damaged or hostile: read right, or refused by file and line, never read
wrong."""

from __future__ import annotations

import json
import sys
from decimal import Decimal
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.common.errors import UserError
from trainer.data import convert, load_questions, validate
from trainer.rewards import unscorable

GOOD = {"id": "a", "question": "who?", "golden_answers": ["x"]}


def written(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def answers(path, **options):
    return [q.golden_answers for q in load_questions(path, **options).rows]


def test_a_number_of_any_size_is_an_answer(tmp_path):
    path = written(tmp_path / "q", GOOD | {"golden_answers": [10**400, 1955.0, 2.5]})
    assert answers(path) == [("1" + "0" * 400, "1955", "2.5")]
    table = pa.table({"question": ["how much?"], "answer": pa.array([Decimal("1.50")])})
    pq.write_table(table, tmp_path / "p")
    assert answers(tmp_path / "p") == [("1.50",)]


def test_a_row_that_is_nested_too_deep_is_named_and_may_be_left_out(tmp_path, request):
    # Libraries raise the limit for the whole process; this is Python's own.
    request.addfinalizer(partial(sys.setrecursionlimit, sys.getrecursionlimit()))
    sys.setrecursionlimit(1000)
    path = tmp_path / "q"
    deep = '{"question": "q", "answer": ' + "[" * 900 + '"x"' + "]" * 900 + "}\n"
    path.write_text(deep + json.dumps(GOOD) + "\n")
    with pytest.raises(UserError, match=r"q, line 1: (is nested too deep|.*recursion)"):
        load_questions(path)
    assert answers(path, skip_bad=True) == [("x",)]


@pytest.mark.parametrize("text", ['["Rome", "Roma"', "['Rome'", "['Rome', 'Ro", '[["Rome"]', '["Rome"] and'])
def test_a_list_as_text_whose_end_is_lost_is_no_answer(tmp_path, text):
    path = written(tmp_path / "q", GOOD | {"golden_answers": text})
    with pytest.raises(UserError, match="looks like a list written as text that can't be read"):
        load_questions(path)
    kept = ("[Rome", "Rome]", "[A] or 'b'", "[citation needed]", "'[\"'", "(a, b")
    assert answers(written(path, GOOD | {"golden_answers": kept})) == [kept]


@pytest.mark.parametrize("no", ["FALSE", "False", "false", "no", "0"])
def test_a_question_that_a_table_marks_as_not_answerable_is_malformed(tmp_path, no):
    path = tmp_path / "q.csv"
    path.write_text(f"question,answer,answerable\nwho?,x,TRUE\nwhy?,y,{no}\n")
    with pytest.raises(UserError, match="line 3: is marked as not answerable"):
        load_questions(path)


@pytest.mark.parametrize("nothing", ["\u200b", "\ufeff", " \u200d\n", "\x00"])
def test_an_answer_of_which_nothing_is_seen_is_none(tmp_path, nothing):
    path = written(tmp_path / "q", GOOD | {"golden_answers": [nothing]})
    with pytest.raises(UserError, match="at least one text, got none"):
        load_questions(path)
    assert answers(written(path, GOOD | {"golden_answers": [nothing, "x"]})) == [("x",)]


@pytest.mark.parametrize(
    ("name", "turn"),
    [
        ("messages", {"role": "user", "content": "Question: who?"}),
        ("conversations", {"from": "human", "value": "who?"}),
        ("context", {"title": "t", "paragraph": "p"}),
    ],
)
def test_a_list_of_objects_in_a_row_is_no_list_of_rows(tmp_path, name, turn):
    row = {name: [turn], "answer": "x"} | ({"query": "who?"} if name == "context" else {})
    path = tmp_path / "q"
    for text in (
        json.dumps(row),
        json.dumps(row, indent=1),
        json.dumps([row, row]),
        json.dumps([row], indent=1),
    ):
        path.write_text(text)
        assert set(answers(path)) == {("x",)}, text
    plain = [{"q": "who?", "answer": "x", "docs": [{"a": 1}]}]
    path.write_text(json.dumps(plain))
    with pytest.raises(UserError, match="its columns are q, answer, docs"):
        load_questions(path)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_wide_characters_without_a_mark_are_read_whatever_the_language(tmp_path, encoding):
    rows = [{"question": "谁" * 300, "answer": "北京"}, {"question": "who?", "answer": "x"}]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / "q").write_bytes(text.encode(encoding))
    assert answers(tmp_path / "q") == [("北京",), ("x",)]


def test_a_quote_that_is_never_closed_does_not_swallow_the_rest_in_silence(tmp_path):
    path = tmp_path / "q.tsv"
    path.write_text('question\tanswer\nwho?\tx\nwhy?\t"To be\nwhen?\ty\nwhere?\tz\n')
    with pytest.raises(UserError, match="line 3: a quote that begins here is never closed"):
        load_questions(path)
    assert answers(path, skip_bad=True) == [("x",)]
    path.write_text('question\tanswer\nwho?\tx\nwhy?\t"To\nbe"')
    assert answers(path) == [("x",), ("To\nbe",)]


def test_two_columns_of_a_name_are_refused_in_parquet_as_in_tables(tmp_path):
    names, columns = ["question", "answer", "answer"], [pa.array(["a"]), pa.array(["x"]), pa.array(["y"])]
    pq.write_table(pa.Table.from_arrays(columns, names=names), tmp_path / "q")
    with pytest.raises(UserError, match="q: two columns are called 'answer'"):
        load_questions(tmp_path / "q")


def test_a_conversion_is_not_written_among_the_files_that_it_reads(tmp_path):
    folder = tmp_path / "questions"
    (folder / "more").mkdir(parents=True)
    written(folder / "train.jsonl", GOOD)
    for inside in (folder / "all.jsonl", folder / "more" / "all.parquet"):
        with pytest.raises(UserError, match="lies in the folder"):
            convert(folder, inside)
    convert(folder, tmp_path / "all.jsonl")
    assert answers(tmp_path / "all.jsonl") == [("x",)]


@pytest.mark.parametrize("golden", ["A", "+", "The", "B", "°", "a b"])
def test_validation_names_the_answers_that_the_rewards_call_unscorable(tmp_path, golden):
    report = validate(written(tmp_path / "q", GOOD | {"golden_answers": ["x", golden]}))
    assert len(report.emptied) == unscorable(golden)
    assert all(f"line 1: of the answer {golden!r}" in line for line in report.emptied)
