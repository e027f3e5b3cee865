"""A path, a column or an import path with a slip: the line names the one that may be meant."""

import os
import sys
from pathlib import Path

import pytest

from services.common.loading.user_code import with_colon
from services.common.names import near_path, nearest, path_like
from services.common.records.columns import columns_told


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (
        "latin1.csv",
        "data/train.jsonl",
        "data/eval.jsonl",
        "data/wiki.jsonl.gz",
        "idx/one/meta.json",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "data" / ".hidden.csv").write_text("x")
    return tmp_path


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("latin1.cvs", "latin1.csv"),
        ("Latin1.csv", "latin1.csv"),
        ("latin.csv", "latin1.csv"),
        ("data/train.json", "data/train.jsonl"),
        ("dat/train.jsonl", "data/train.jsonl"),
        ("dta/trian.jsonl", "data/train.jsonl"),
        ("data/wiki.jsonl", "data/wiki.jsonl.gz"),
        ("idx/oen", "idx/one"),
        ("./latin1.cvs", "latin1.csv"),
    ],
)
def test_a_slip_in_any_part_of_a_path_is_seen(given, meant):
    assert near_path(given) == f"; did you mean {meant}?"
    assert near_path(Path(given).absolute()) == f"; did you mean {Path(meant).absolute()}?"


@pytest.mark.parametrize(
    "given",
    ["latin1.csv", "data", "dev.jsonl", "data/test.jsonl", "none.jsonl", "data/hidden.csv", "", "/", ".",
     "nope/train.jsonl", "latin1.csv/x", "a\0b", "x" * 5000, "q" + "/x" * 2000],
)  # fmt: skip
def test_what_is_there_and_what_nothing_is_like_gets_no_word(given):
    assert near_path(given) == ""


def test_what_would_not_fit_is_not_meant():
    assert path_like("idx/oen", Path.is_dir) == Path("idx/one")
    assert path_like("latin1.cvs", Path.is_dir) is None


def test_links_that_lead_nowhere_and_a_current_folder_that_is_gone_end_the_search(tmp_path, monkeypatch):
    os.symlink(tmp_path / "gone", tmp_path / "lost.csv")
    assert near_path("lost.csv") == "" and near_path("lsot.csv") == ""
    (tmp_path / "left").mkdir()
    monkeypatch.chdir(tmp_path / "left")
    (tmp_path / "left").rmdir()
    assert near_path("latin1.cvs") == ""
    monkeypatch.chdir(tmp_path)


def test_swapped_letters_are_a_slip_and_another_word_is_none():
    assert nearest("oen", ["one", "two"]) == "one"
    assert nearest("trace", ["train"]) is None and nearest("ab", ["ba"]) is None


def test_a_dot_for_the_colon_of_an_import_path_is_seen(tmp_path, monkeypatch):
    (tmp_path / "dotted_own").mkdir()
    (tmp_path / "dotted_own" / "part.py").write_text("def search(query, topk): ...\nNUMBER = 1\n")
    (tmp_path / "dotted_own" / "broken.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert with_colon("dotted_own.part.search") == "; did you mean dotted_own.part:search?"
    for text in ("dotted_own.part.NUMBER", "dotted_own.part.nope", "dotted_own.part", "dotted_own.broken.x",
                 "latin1.csv", "idx/one", "my.index", "a..b", "dotted_own.part:search", ""):  # fmt: skip
        assert with_colon(text) == "", text
    for name in [name for name in sys.modules if name.startswith("dotted_own")]:
        del sys.modules[name]


def test_a_column_or_a_key_in_one_is_named():
    row = {"Frage": "a", "meta": {"answer": "b"}}
    assert columns_told(row, "Farge") == "Frage, meta; did you mean Frage?"
    assert columns_told(row, "meta.anwser") == "Frage, meta; did you mean meta.answer?"
    assert columns_told(row, "mtea.answer") == "Frage, meta; did you mean meta.answer?"
    assert columns_told(row, "Quelle") == "Frage, meta" and columns_told({}, "x") == "none"


def test_an_ending_alone_makes_no_name_like_another(tmp_path):
    (tmp_path / "ok.yaml").write_text("x")
    assert near_path("nope.yaml") == "" and near_path("okk.yml") == "; did you mean ok.yaml?"
