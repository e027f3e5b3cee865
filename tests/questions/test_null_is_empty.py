"""`--null-is-empty` and the key `null_is_empty`: cells such as NULL count as empty."""

import json
from pathlib import Path

import pytest
from command_line import run  # noqa: F401

from retriever_service.index_folder.corpus import read_corpus
from retriever_service.index_folder.keys import CorpusKeys
from trainer.config.schema import load_config
from trainer.data.columns import Keys
from trainer.data.named_columns import questions_in
from trainer.data.questions import NO_KEYS
from trainer.session.preflight.corpora import keys_of

CORPUS = "Nr,Label,Story\nC1,Ember,NULL\nC2,nan,A pit.\nNULL,Pit,It is deep.\nC4,None of all,N/A is a book.\n"
COLUMNS = ("--text-key", "Story", "--title-key", "Label", "--id-key", "Nr")
QUESTIONS = "id,question,answers\nq1,who?,NULL\nq2,what?,Ada\nnan,where?,here\nq4,NULL,Bob\n"


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.csv").write_text(CORPUS)
    (tmp_path / "q.csv").write_text(QUESTIONS)


def test_an_index_tells_of_them_and_leaves_them_out_on_request(run, files):
    status, out, err = run("index", "build", "c.csv", "-o", "kept", *COLUMNS)
    assert (
        status == 0
        and out.startswith("kept: 4 passages")
        and err.splitlines()
        == [
            "3 passages have a text, a title or an id such as NULL, nan, None, N/A or -, and kept:",
            "c.csv, line 2: of the passage 'C1' the text is 'NULL'",
            "c.csv, line 3: of the passage 'C2' the title is 'nan'",
            "c.csv, line 4: of the passage 'NULL' the id is 'NULL'",
            "--null-is-empty (of a run: retriever.null_is_empty) takes such cells for empty",
        ]
    )
    status, _, err = run("index", "build", "c.csv", "-o", "i", *COLUMNS, "--null-is-empty")
    assert status == 2 and err.startswith("unspiral: c.csv, line 2: `Story` is empty; 1 of its 4 rows")
    build = ("index", "build", "c.csv", "-o", "i", *COLUMNS, "--null-is-empty", "--skip-bad")
    status, out, err = run(*build)
    assert (
        status == 0 and out.startswith("i: 3 passages") and "line 4: no id; its place names it 'row_2'" in err
    )
    found = json.loads(run("index", "search", "i", "pit deep", "--json")[1])
    assert {one["id"]: one["contents"] for one in found} == {
        "C2": "A pit.",
        "row_2": '"Pit"\nIt is deep.',
    }
    assert run(*build)[0] == 0
    status, _, err = run("index", "build", "c.csv", "-o", "i", *COLUMNS, "--skip-bad")
    assert status != 0 and "holds an index of other settings" in err


def test_the_title_within_the_contents_counts_too(tmp_path):
    file = tmp_path / "c.jsonl"
    rows = [
        {"id": "1", "contents": '"NULL"\nA pit.'},
        {"id": "2", "contents": '"Pit"\nnan'},
        {"id": "3", "contents": "deep", "mark": "NULL"},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = list(read_corpus(file, skip_bad=True, keys=CorpusKeys(null_is_empty=True)))
    assert [(one.id, one.contents, one.fields) for one in read] == [
        ("1", "A pit.", {}),
        ("3", "deep", {"mark": "NULL"}),
    ]


def test_data_validate_passages_and_convert_take_it(run, files):
    status, out, err = run("data", "validate", "c.csv", *COLUMNS, "--null-is-empty")
    assert status == 2 and out.startswith("c.csv, line 2: `Story` is empty") and "`Story`" not in err
    assert err.startswith("unspiral: c.csv: 1 of 4 rows are malformed; ")
    assert "1 passage has no id and is named by its place\n" in out and "such as" not in out
    status, out, _ = run("data", "passages", "c.csv", "p.jsonl", *COLUMNS, "--null-is-empty")
    assert status == 0 and out.startswith("c.csv, line 2: no text\n") and "such as" not in out
    status, out, err = run("data", "validate", "q.csv", "--null-is-empty")
    assert status == 2 and "2 of 4 rows are malformed" in err and "such as" not in out
    status, out, err = run("data", "convert", "q.csv", "o.jsonl", "--null-is-empty", "--skip-bad")
    assert status == 0 and "2 rows were left out, malformed" in err
    rows = [json.loads(line) for line in Path("o.jsonl").read_text().splitlines()]
    assert [(row["id"], row["golden_answers"]) for row in rows] == [("q2", ["Ada"]), ("q_row_2", ["here"])]


def test_init_writes_it_and_a_run_reads_by_it(run, files):
    given = (
        "--model",
        "lab:0",
        "--data",
        "q.csv",
        "--corpus",
        "c.csv",
        *COLUMNS,
        "--null-is-empty",
        "--skip-bad",
    )
    status, _, err = run("init", *given)
    assert status == 0 and "note: c.csv: 1 passage has no id and is named by its place\n" in err
    config = load_config("unspiral.yaml")
    assert keys_of(config.retriever).null_is_empty and config.data.null_is_empty
    data = config.data.model_copy(update={"skip_bad": True})
    assert [one.id for one in questions_in(data, "q.csv").rows] == ["q2", "q_row_2"]


def test_a_list_loses_those_answers_and_keys_of_columns_stay_apart_from_it(tmp_path):
    row = {"question": "who?", "golden_answers": ["NULL", "Ada", ""], "reward_model": None}
    keys = Keys(null_is_empty=True)
    assert keys.applied(row)["golden_answers"] == ["Ada"] and NO_KEYS.applied(row) == row
    assert not keys and not CorpusKeys(null_is_empty=True)
    file = tmp_path / "q.jsonl"
    file.write_text(json.dumps(row | {"asked": "NULL"}))
    assert Keys("asked", "gone", null_is_empty=True).of_file(file) == Keys("asked", null_is_empty=True)
