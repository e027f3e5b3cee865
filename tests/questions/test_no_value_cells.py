"""Cells such as NULL and nan, which tables hold where there is nothing: told of in questions and corpora, and
kept."""

import json

import pytest
from command_line import run  # noqa: F401

from services.common.records.columns import NO_VALUE, is_no_value
from trainer.commands.checks.doctor_files import _corpus_of, _questions_of
from trainer.config.schema import load_config

SUCH = "such as NULL, nan, None, N/A or -"
QUESTIONS = "question,answer\nwho?,nan\nwhat?,NULL\nwhere?,None\nwhen?,N/A\nNaN,Ada\nwhich?,Nantes\nhow?,-\n"
CORPUS = "id,title,text\n1,Ember,NULL\n2,nan,A pit.\n3,None of all,N/A is a book.\n4,Pit,-\n"


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q.csv").write_text(QUESTIONS)
    (tmp_path / "c.csv").write_text(CORPUS)
    (tmp_path / "u.yaml").write_text(
        "{model: {path: 'lab:0'}, data: {train: q.csv}, retriever: {corpus: c.csv}}"
    )


def test_questions_and_answers_are_named_and_kept(run, files):
    status, out, err = run("data", "validate", "q.csv")
    assert (status, err) == (0, "")
    for line, what in ((2, "answer 'nan'"), (3, "answer 'NULL'"), (4, "answer 'None'"), (5, "answer 'N/A'")):
        assert f"q.csv, line {line}: the {what} is what tables hold where there is nothing\n" in out
    assert "q.csv, line 6: the question 'NaN' is what tables hold" in out
    assert (
        f"5 rows have a question, an answer, an id or a source {SUCH}, which tables hold where there is "
        "nothing; a run takes it at its word; --null-is-empty (of a run: data.null_is_empty) takes such "
        "cells for empty\n"
    ) in out
    assert "line 8: of the answer '-' scoring" in out and "line 8: the" not in out and "line 7" not in out
    found = json.loads(run("data", "validate", "q.csv", "--json")[1])
    assert [line.partition(":")[0] for line in found["no_value"]] == [f"q.csv, line {n}" for n in range(2, 7)]


def test_texts_and_titles_of_passages_are_named_and_kept(run, files):
    status, out, err = run("data", "validate", "c.csv")
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        "c.csv, line 2: of the passage '1' the text is 'NULL'",
        "c.csv, line 3: of the passage '2' the title is 'nan'",
        "c.csv, line 5: of the passage '4' the text is '-'",
        "c.csv: a corpus of 4 passages",
        f"3 passages have a text, a title or an id {SUCH}; --null-is-empty (of a run: "
        "retriever.null_is_empty) takes such cells for empty",
    ]
    assert json.loads(run("data", "validate", "c.csv", "--json")[1])["no_value"] == 3


@pytest.mark.parametrize(
    "rows",
    [CORPUS, 'id,contents\n1,"""Ember""\nNULL"\n2,"""nan""\nA pit."\n3,whole\n4,-\n'],
    ids=["a title apart", "within the contents"],
)
def test_data_passages_tells_of_them(run, files, tmp_path, rows):
    (tmp_path / "c.csv").write_text(rows)
    status, out, _ = run("data", "passages", "c.csv", "p.jsonl")
    assert status == 0 and out.count("the text is 'NULL'\n") == out.count("the title is 'nan'\n") == 1
    assert f"3 rows have a text, a title or an id {SUCH}, which tables hold where there is nothing\n" in out
    assert len((tmp_path / "p.jsonl").read_text().splitlines()) == 4


def test_the_doctor_and_init_note_them(run, files):
    config = load_config("u.yaml")
    asked = _questions_of(config, "data.train", "q.csv")
    assert asked.level == "note"
    assert (
        f"5 rows have a question, an answer, an id or a source {SUCH}; unspiral data validate q.csv lists all"
        in str(asked)
    )
    searched = _corpus_of("retriever", config.retriever)
    assert searched.level == "note"
    assert f"3 passages have a text, a title or an id {SUCH}; unspiral data validate c.csv lists all" in str(
        searched
    )
    given = ("--model", "lab:0", "--data", "q.csv", "--corpus", "c.csv")
    status, _, err = run("init", *given)
    assert (
        status == 0
        and (
            f"note: 5 rows have a question, an answer, an id or a source {SUCH}; --null-is-empty (of a run: "
            "data.null_is_empty) takes such cells for empty; the first: q.csv, line 2"
        )
        in err
    )
    assert f"note: c.csv: 3 passages have a text, a title or an id {SUCH}; --null-is-empty (of a run" in err


def test_words_that_say_something_are_none_of_them():
    assert all(map(is_no_value, [*NO_VALUE, " NULL ", "NaN", "None"]))
    assert not any(map(is_no_value, ["", "Nantes", "none of these", "0", "no", "NA", "Nan Goldin", "?"]))
