"""A malformed row is named in one form by every command, with the number of those that --skip-bad leaves
out."""

import json
import re

import pytest
from command_line import fresh_folder, run  # noqa: F401
from places import ROOT

from retriever_service.index_folder import corpus as corpora
from retriever_service.index_folder.description import read_info
from services.common.errors import UserError
from trainer.data import questions
from trainer.data.questions import load_questions


def passages(file, ids):
    """The rows of a corpus; None is a malformed one."""
    lines = ["nonsense" if id is None else json.dumps({"id": id, "contents": f"town {id}"}) for id in ids]
    file.write_text("".join(line + "\n" for line in lines))


def built(run, *options):
    return run("index", "build", "c.jsonl", "-o", "i", *options)


@pytest.mark.parametrize(
    ("ids", "says", "left_out"),
    [
        (["0", None, "1"], "1 of its 3 rows is malformed: {} leaves it out", 1),
        (["0", None, "1", None, "2"], "2 of its 5 rows are malformed: {} leaves these 2 out", 2),
        (
            ["0", "1", "1", None, "2", "0"],
            "1 of its 6 rows is malformed, and 2 others have the id of an earlier one: {} leaves these 3 out",
            3,
        ),
    ],
)
def test_the_first_malformed_row_tells_how_many_there_are(run, tmp_path, ids, says, left_out):
    passages(tmp_path / "c.jsonl", ids)
    status, _, err = built(run)
    assert status == 2 and err.startswith(f"unspiral: c.jsonl, line {1 + ids.index(None)}: not JSON")
    assert err.endswith(f"; {says.format('--skip-bad (of a run: retriever.skip_bad)')}\n")
    assert built(run, "--skip-bad")[0] == 0 and read_info("i").skipped == left_out


def test_repeated_ids_alone_are_counted_too(run, tmp_path):
    passages(tmp_path / "c.jsonl", ["0", "1", "0", "1", "0"])
    status, _, err = built(run)
    assert status == 2 and err.startswith("unspiral: c.jsonl, line ")
    assert "3 passages have the id of an earlier one: --skip-bad keeps the first passage of each id" in err


def test_what_an_index_holds_already_is_counted(run, tmp_path):
    passages(tmp_path / "c.jsonl", ["0", "1", "2"])
    assert built(run, "--postings", "packed")[0] == 0
    passages(tmp_path / "more.jsonl", ["1", "3", "2"])
    status, _, err = run("index", "add", "i", "more.jsonl")
    assert status == 2 and err.startswith("unspiral: more.jsonl, line 1: id '1' is in the index ")
    assert "; 2 passages of it are there by id: `unspiral index delete` takes such out, and --skip-bad" in err


def test_only_so_many_rows_are_counted(run, tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "COUNTED", 3)
    passages(tmp_path / "c.jsonl", ["0", None, None, "1", None, None, "2"])
    end = "--skip-bad (of a run: retriever.skip_bad) leaves such rows out\n"
    assert built(run)[2].endswith(f"; 3 of its first 5 rows are malformed: {end}")
    passages(tmp_path / "c.jsonl", ["0", "1", "1", "2", None, None, "3"])  # later than what is counted again
    assert built(run)[2].endswith(f"; 2 of its 7 rows are malformed: {end}")
    passages(tmp_path / "c.jsonl", ["0", "1", "1", "2", *[None] * 5])
    assert built(run)[2].endswith(f"; 4 of its first 8 rows are malformed: {end}")


def test_a_table_and_a_folder_are_named_and_counted_alike(run, tmp_path):
    (tmp_path / "c.csv").write_text("id,text\n0,one\n1,\n2,two\n0,three\n3,\n")
    says = "2 of its 5 rows are malformed, and 1 other has the id of an earlier one: "
    status, _, err = run("index", "build", "c.csv", "-o", "i")
    assert status == 2 and err.startswith("unspiral: c.csv, line 3: ") and f"; {says}" in err
    assert run("data", "validate", "c.csv")[1].startswith("c.csv, line 3: ")
    (tmp_path / "c").mkdir()
    (tmp_path / "c.csv").rename(tmp_path / "c" / "1.csv")
    passages(tmp_path / "c" / "2.jsonl", ["7", None])
    status, _, err = run("index", "build", "c", "-o", "i")
    assert status == 2 and err.startswith("unspiral: c/1.csv, line 3: ") and "; 3 of its 7 rows are" in err
    status, _, err = run("index", "build", "c", "-o", "i", "--skip-bad")
    assert "c, row 4: id '0' again; that on row 1 is kept" in err


def test_questions_tell_how_many_rows_are_malformed(run, tmp_path, monkeypatch):
    good, bad = {"question": "who?", "golden_answers": ["me"]}, {"question": "who?"}
    file = tmp_path / "q.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in (good, bad, good, bad, good)))
    with pytest.raises(
        UserError, match=r"; 2 of its 5 rows are malformed: data.skip_bad=true leaves these 2"
    ):
        load_questions(file, first=3)
    status, _, err = run("data", "convert", "q.jsonl", "o.jsonl")
    assert status == 2 and err.startswith("unspiral: q.jsonl, line 2: ")
    assert err.endswith("; 2 of its 5 rows are malformed: --skip-bad leaves these 2 out\n")
    assert len(load_questions(file, skip_bad=True).rows) == 3
    monkeypatch.setattr(questions, "COUNTED", 2)
    with pytest.raises(UserError, match=r"; 2 of its first 4 rows are malformed: .* leaves such rows out"):
        load_questions(file)


def test_no_message_names_a_place_in_another_form():
    """`FILE, line 3`, everywhere: a reader looks for one form, and a path may hold a colon."""
    other = re.compile(r"\{[\w.]*(?:path|file|corpus|name)\}:\{(?:self\.)?(?:line|number|row|n|lines\[)")
    rooms = ("trainer", "services", "retriever_service", "unspiral_health")
    texts = {file: file.read_text() for room in rooms for file in (ROOT / room).rglob("*.py")}
    assert [str(file) for file, text in texts.items() if other.search(text)] == []


def test_all_commands_name_the_rows_that_they_leave_out_in_one_form(run, tmp_path):
    rows = [
        {"id": "0", "title": "Rome", "text": "town", "question": "who?", "answer": "Ada"},
        *[{"id": "1"}] * 4,
    ]
    for name in ("q.jsonl", "c.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    for command, kind in (
        (("data", "convert", "q.jsonl", "o.jsonl"), "rows were left out, malformed"),
        (("data", "passages", "c.jsonl", "p.jsonl"), "rows were left out, malformed"),
        (("index", "build", "c.jsonl", "-o", "i"), "lines were left out, malformed or with the id of an"),
    ):
        status, _, err = run(*command, "--skip-bad")
        said = err.splitlines()
        assert status == 0 and said[0].startswith(f"4 {kind}") and said[0].endswith("; the first 3:"), command
        file = next(word for word in command if word.endswith(".jsonl"))
        assert [line.split(":")[0] for line in said[1:]] == [f"{file}, line {n}" for n in (2, 3, 4)]


def test_skip_bad_is_not_advised_where_nothing_would_be_left(run, tmp_path):
    (tmp_path / "q.csv").write_text("Frage;Antwort\nwho?;Ada\nwhere?;here\n")
    (tmp_path / "c.jsonl").write_text('{"id": "1"}\n{"id": "2"}\n')
    for command in (
        ("data", "convert", "q.csv", "o.jsonl"),
        ("data", "passages", "c.jsonl", "p.jsonl"),
        ("index", "build", "c.jsonl", "-o", "i"),
    ):
        status, _, err = run(*command)
        assert status == 2 and "2 of its 2 rows are malformed" in err and "--skip-bad" not in err, command
    status, _, err = run("data", "passages", "c.jsonl", "p.jsonl", "--skip-bad")
    assert (
        status == 2 and "c.jsonl: none of its 2 rows can be read; the first: c.jsonl, line 1: no text" in err
    )
