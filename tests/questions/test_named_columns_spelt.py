"""Columns that a user names: in another spelling, with a dot in the name, and files that hold nothing."""

import json

import pytest
from command_line import run  # noqa: F401

from retriever_service.index_folder.corpus import read_corpus
from retriever_service.index_folder.keys import CorpusKeys
from services.common.records.columns import column_of, value_at

CLOCKS = "Object.No,Full Name,Long-Text\nn1,Clock,A clock.\nn2,Watch,A watch.\n"
AS_BY_NAME = [("n1", '"Clock"\nA clock.'), ("n2", '"Watch"\nA watch.')]


@pytest.fixture
def clocks(tmp_path):
    (tmp_path / "clocks.csv").write_text(CLOCKS)
    return tmp_path / "clocks.csv"


@pytest.mark.parametrize(
    "keys",
    [
        ("Long-Text", "Full Name", "Object.No"),
        ("long-text", "full name", "object.no"),
        ("long_text", "FullName", "object_no"),
    ],
)
def test_a_corpus_takes_its_columns_in_any_spelling(clocks, keys):
    rows = [(row.id, row.contents) for row in read_corpus(str(clocks), keys=CorpusKeys(*keys))]
    assert rows == AS_BY_NAME


def test_a_column_that_is_not_there_is_told(run, clocks):
    status, _, err = run("data", "validate", str(clocks), "--text-key", "Long")
    assert (status, err) == (
        2,
        f"unspiral: {clocks}: has no column 'Long', the text key; its columns are Object.No, Full Name, "
        "Long-Text; did you mean Long-Text?\n",
    )


def test_the_name_as_it_stands_counts_before_another_spelling_and_a_key_in_a_column():
    row = {"a_b": 1, "a.b": 2, "a": {"b": 3}, "Meta": {"Key": {"x": 4}}}
    assert [value_at(row, key) for key in ("a.b", "a_b", "A.B")] == [2, 1, 1]
    assert value_at({"a": {"b": 3}}, "a.b") == 3 and value_at(row, "meta.Key.x") == 4
    assert (column_of(row, "meta.Key"), column_of(row, "other"), value_at(row, "other.x")) == (
        "Meta",
        None,
        None,
    )


@pytest.mark.parametrize("keys", [("Frage", "Antwort"), ("frage", "ANTWORT"), ("frage", "info.gold")])
def test_questions_take_their_columns_in_any_spelling(run, tmp_path, keys):
    file = tmp_path / "q.jsonl"
    file.write_text(json.dumps({"Frage": "wer?", "Antwort": "Ada", "Info": {"gold": "Ada"}}) + "\n")
    status, out, err = run(
        "data",
        "convert",
        str(file),
        str(tmp_path / "o.jsonl"),
        "--question-key",
        keys[0],
        "--answer-key",
        keys[1],
    )
    assert (status, err) == (0, "") and out.startswith("1 question written")
    assert json.loads((tmp_path / "o.jsonl").read_text())["golden_answers"] == ["Ada"]


def test_against_an_empty_file_nothing_was_compared(run, tmp_path):
    file = tmp_path / "q.jsonl"
    file.write_text(json.dumps({"question": "who?", "golden_answers": ["Ada"]}) + "\n")
    (tmp_path / "none.jsonl").write_text("")
    status, _, err = run("data", "validate", str(file), "--against", str(tmp_path / "none.jsonl"))
    assert (status, err) == (
        2,
        f"unspiral: --against {tmp_path / 'none.jsonl'}: empty; expected at least one question\n",
    )


def test_a_listed_row_acts_on_no_terminal(run, tmp_path):
    wild = {"question": "\x1b[2J who?", "golden_answers": ["\x1b[31mAda"], "id": "\x1b[0m"}
    file = tmp_path / "q.jsonl"
    file.write_text(2 * (json.dumps(wild) + "\n"))
    _, out, err = run("data", "validate", str(file), "--against", str(file))
    assert "\x1b" not in out + err and "\ufffd[2J who?" in out
