"""A file that is there, and that the user names, is replaced by no command that was not told to."""

import json
import shlex

import pytest
from command_line import COMMANDS, fresh_folder, run, runs  # noqa: F401

from services.common.errors import UserError
from services.common.users_files import refuse_to_replace

MAKES = {
    "report": "report demo-0 --out OUT",
    "report --paper": "report demo-0 --paper --out OUT",
    "trace": "trace demo-0 1 --out OUT",
    "eval": "eval --config c.yaml --out OUT",
    "eval --answers": "eval --config c.yaml --answers OUT",
    "displacement": "displacement demo-0 --out OUT",
    "init": "init --model m --data q.jsonl --corpus c.jsonl --out OUT",
    "data convert": "data convert q.jsonl --out OUT",
    "data passages": "data passages notes.txt --out OUT",
    "eval page": "eval page there --out OUT",
}


@pytest.fixture
def mine(runs, tmp_path, monkeypatch):
    """A file of the user's, which no command made."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q.jsonl").write_text('{"question": "q?", "golden_answers": ["a"]}\n')
    (tmp_path / "c.jsonl").write_text('{"id": "a", "contents": "river"}\n')
    (tmp_path / "notes.txt").write_text("A river.\n")
    (tmp_path / "m").mkdir()
    config = {"model": {"path": "m"}, "data": {"train": "q.jsonl", "eval": "q.jsonl"}}
    (tmp_path / "c.yaml").write_text(json.dumps(config | {"retriever": {"url": "http://127.0.0.1:1"}}))
    file = tmp_path / "mine.jsonl"
    file.write_text("mine\n")
    return file


@pytest.mark.parametrize("command", MAKES)
def test_a_file_that_is_there_stays(run, mine, command):
    words = shlex.split(MAKES[command].replace("OUT", mine.name))
    option = "" if command.startswith("data") else "--answers " if "--answers" in command else "--out "
    expected = f"unspiral: {option}{mine.name}: is there already; --overwrite replaces it\n"
    assert run(*words) == (2, "", expected)
    assert mine.read_text() == "mine\n"


@pytest.mark.parametrize("command", MAKES)
def test_a_folder_is_no_file_to_replace(run, mine, command):
    (mine.parent / "folder").mkdir()
    status, out, err = run(*shlex.split(MAKES[command].replace("OUT", "folder")), "--overwrite")
    assert (status, out) == (2, "") and err.endswith("folder: is a folder; expected the name of a file\n")


def test_every_command_with_a_file_to_write_takes_overwrite():
    """The others make folders, of which they replace what they have made themselves."""
    folders = {"warm-start", "export", "likelihood export", "index build", "index convert"}
    for path, command in COMMANDS.items():
        names = {name for parameter in command.params for name in parameter.opts}
        if "--out" in names and " ".join(path) not in folders:
            assert "--overwrite" in names, path


def test_a_report_is_replaced_where_that_is_asked_for_and_at_its_own_place(run, mine, runs):
    assert run("report", "demo-0", "--out", mine.name, "--overwrite") == (0, f"{mine.name}\n", "")
    assert mine.read_text().startswith("<!doctype html>")
    for _ in range(2):
        assert run("report", "demo-0")[0] == 0
        assert run("report", "demo-0", "--out", "runs/demo-0/report.html")[0] == 0


def test_the_answers_beside_the_scores_stay_too(run, mine):
    (mine.parent / "s.answers.jsonl").write_text("mine\n")
    expected = "unspiral: --answers s.answers.jsonl: is there already; --overwrite replaces it\n"
    assert run("eval", "--config", "c.yaml", "--out", "s.json") == (2, "", expected)


def test_what_is_no_file_of_the_users_may_be_there(tmp_path):
    from pathlib import Path

    refuse_to_replace("--out", Path("/dev/stdout"), overwrite=False)
    refuse_to_replace("--out", Path("/dev/null"), overwrite=False)
    with pytest.raises(UserError, match=r"^--out: is a folder; "):
        refuse_to_replace("--out", tmp_path, overwrite=True)
