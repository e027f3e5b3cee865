"""Passages without an id in a corpus that has a column of ids: named by their place, told of, and unique."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command_line import run  # noqa: F401

from retriever_service.index_folder.corpus import read_corpus
from trainer.data.corpora.passages import validate_corpus

ROWS = "Nr;Story\nA;Anna kept it.\n;Bob kept it.\nC;Cleo kept it.\n ;Dora kept it.\n"
KEYS = ("--text-key", "Story", "--id-key", "Nr")


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.csv").write_text(ROWS)
    return "c.csv"


def test_a_build_names_them_by_their_place_and_says_so(run, corpus):
    status, out, err = run("index", "build", corpus, "-o", "i", *KEYS)
    assert (
        status == 0
        and out.startswith("i: 4 passages")
        and err.splitlines()
        == [
            "2 passages have no id and are named by their place:",
            "c.csv, line 3: no id; its place names it 'row_1'",
            "c.csv, line 5: no id; its place names it 'row_3'",
        ]
    )
    (found,) = json.loads(run("index", "search", "i", "dora", "--json")[1])
    assert (found["id"], found["contents"]) == ("row_3", "Dora kept it.")
    status, out, err = run("data", "validate", corpus, *KEYS)
    assert (status, err) == (0, "") and out.splitlines() == [
        "c.csv, line 3: no id; its place names it 'row_1'",
        "c.csv, line 5: no id; its place names it 'row_3'",
        "c.csv: a corpus of 4 passages",
        "2 passages have no id and are named by their place",
    ]


def test_an_addition_needs_ids(run, corpus, tmp_path):
    (tmp_path / "first.csv").write_text("Nr;Story\nZ;Zoe kept it.\n;Yan kept it.\n")
    assert run("index", "build", "first.csv", "-o", "i", "--postings", "packed", *KEYS)[0] == 0
    status, _, err = run("index", "add", "i", corpus)
    assert status == 2 and err.startswith("unspiral: c.csv, line 3: `Nr` is empty; 2 of its 4 rows are malf")
    status, out, err = run("index", "add", "i", corpus, "--skip-bad")
    assert status == 0 and out.startswith("i: 4 passages") and "c.csv, line 3: `Nr` is empty" in err


def test_an_id_that_a_place_gave_stays_unique(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.csv").write_text("id,text\n,Anna\nrow_0,Bob\n")
    status, _, err = run("index", "build", "c.csv", "-o", "i")
    assert status == 2 and "c.csv, row 2: id 'row_0' again, as on row 1" in err.replace(
        "line 3", "row 2"
    ).replace("line 2", "row 1")


def test_null_and_whole_numbers_of_pandas_in_lines_and_parquet(tmp_path):
    rows = [{"id": 1.0, "text": "a"}, {"id": None, "text": "b", "docid": ""}, {"text": "c"}]
    file = tmp_path / "c.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"id": NaN, "text": "d"}\n')
    assert [(one.id, one.placed, one.fields.get("docid")) for one in read_corpus(file)] == [
        ("1", False, None),
        ("row_1", True, None),
        ("row_2", True, None),
        ("row_3", True, None),
    ]
    assert validate_corpus(file).no_id == 3
    file = tmp_path / "c.parquet"
    pq.write_table(pa.table({"id": [7.0, None, float("nan")], "text": ["a", "b", "c"]}), file)
    assert [one.id for one in read_corpus(file)] == ["7", "row_1", "row_2"]
    pq.write_table(pa.table({"id": [7.5], "text": ["a"]}), file)
    (reason,) = validate_corpus(file).problems
    assert "expected `id`: a string that is not empty, or an integer, got a number" in reason
