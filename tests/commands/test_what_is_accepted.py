"""What a key or an option accepts is told in our words, without those that a library puts before them."""

import json

import pytest
from command_line import fresh_folder, run  # noqa: F401

from services.common.printing.messages import said


def test_a_choice_that_is_none_is_told_without_the_words_of_the_library(run):
    assert run("doctor", "--role", "x") == (
        2,
        "",
        "unspiral: Invalid value for '--role' (env var: 'UNSPIRAL_ROLE'): 'x' is not one of 'workstation', "
        "'retriever', 'likelihood', 'control', 'node'.\n",
    )
    status, _, err = run("likelihood", "export", "r", "o", "--to", "csv")
    assert (status, err.count("\n")) == (2, 1) and ": 'csv' is not one of 'parquet', " in err


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("Value error, expected a colour", "expected a colour"),
        ("Invalid value for '--a': Value error, no", "Invalid value for '--a': no"),
        ("Input should be 'Value error, '", "Input should be 'Value error, '"),
    ],
)
def test_only_what_stands_before_our_words_goes(message, told):
    assert said(message) == told


@pytest.mark.parametrize("given", ["", " "])
@pytest.mark.parametrize("option", ["--text-key", "--title-key", "--id-key"])
def test_an_empty_name_of_a_corpus_column_is_refused(run, tmp_path, option, given):
    (tmp_path / "c.jsonl").write_text('{"title": "Rome", "text": "A town."}\n')
    says = f"unspiral: {option} (of a run: retriever.{option[2:].replace('-', '_')}): is empty; "
    says += "expected a column\n"
    assert run("index", "build", "c.jsonl", "-o", "i", option, given) == (2, "", says)
    assert run("data", "validate", "c.jsonl", option, given) == (2, "", says)
    assert not (tmp_path / "i").exists()


@pytest.mark.parametrize("option", ["--question-key", "--answer-key"])
def test_an_empty_name_of_a_column_of_questions_is_refused(run, tmp_path, option):
    (tmp_path / "q.jsonl").write_text(json.dumps({"question": "who?", "answer": "Ada"}) + "\n")
    key = option[2:].replace("-", "_")
    says = f"unspiral: {option} (of a run: data.{key}): is empty; expected a column\n"
    assert run("data", "validate", "q.jsonl", option, "") == (2, "", says)
    assert run("data", "convert", "q.jsonl", "o.jsonl", option, "") == (2, "", says)


def test_a_report_goes_to_a_file_in_a_folder_that_is_there(run, tmp_path):
    (tmp_path / "m.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    assert run("report", "m.jsonl", "-o", "/") == (
        2,
        "",
        "unspiral: --out /: is a folder; expected the name of a file\n",
    )
    assert run("report", "m.jsonl", "-o", "not/there/x.html") == (
        2,
        "",
        "unspiral: --out not/there/x.html: no folder not/there; expected a file in a folder that is there\n",
    )
    assert not (tmp_path / "not").exists()
    assert run("report", "m.jsonl", "-o", "x.html") == (0, "x.html\n", "")
