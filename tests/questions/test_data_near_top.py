"""A folder that is not one of questions is refused before all of it is read."""

import json

import pytest
from command_line import fresh_folder, run  # noqa: F401

from trainer.data.checks import near_top

QUESTION = json.dumps({"question": "who?", "golden_answers": ["Ada"]}) + "\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "q.jsonl").write_text(QUESTION.replace("who", "where"))
    return tmp_path / "other"


def deep(folder, *, levels):
    inside = folder.joinpath(*"abcdef"[:levels])
    inside.mkdir(parents=True)
    return inside / "train.jsonl"


def test_a_question_below_the_upper_levels_alone_is_not_looked_for(run, folder, monkeypatch):
    deep(folder, levels=4).write_text(QUESTION)
    (folder / "notes.bin").write_text("no rows\n")
    monkeypatch.setattr("pathlib.Path.rglob", None)  # the whole of it
    assert run("data", "validate", "q.jsonl", "--against", str(folder)) == (
        2,
        "",
        f"unspiral: --against {folder}: no questions in the first 1 files of its upper 3 levels; expected a "
        "file or folder of questions\n",
    )


def test_no_more_files_are_looked_into_than_are_told(run, folder, monkeypatch):
    folder.mkdir()
    for n in range(5):
        (folder / f"{n}.conf").write_text("no rows\n")
    (folder / "z.jsonl").write_text(QUESTION)
    monkeypatch.setattr(near_top, "FILES", 4)
    status, _, err = run("data", "validate", "q.jsonl", "--against", str(folder))
    assert status == 2 and "no questions in the first 4 files" in err


def test_a_folder_with_a_question_near_its_top_is_read_to_its_end(run, folder):
    deep(folder, levels=2).write_text(QUESTION)
    deep(folder / "g", levels=5).write_text(QUESTION.replace("who", "where"))
    status, out, err = run("data", "validate", "q.jsonl", "--against", str(folder))
    assert (status, err) == (2, f"unspiral: q.jsonl: 1 of 1 questions stand in {folder} too\n"), out


def test_of_a_small_folder_the_reading_says_what_is_wrong(run, folder):
    folder.mkdir()
    (folder / "rows.jsonl").write_text('{"a": 1}\n')
    status, _, err = run("data", "validate", "q.jsonl", "--against", str(folder))
    assert status == 2 and "rows.jsonl, line 1" in err and "upper" not in err
