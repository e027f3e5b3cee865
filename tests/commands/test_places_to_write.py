"""Where nothing can be written is told before the work begins, not hours later."""

import json
import os

import pytest
from command_line import run  # noqa: F401

from services.common.errors import UserError
from services.common.users_files import make_folder

CLOSED = "/proc"  # nothing can be written there, by root neither


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q.jsonl").write_text(json.dumps({"question": "who?", "golden_answers": ["Ada"]}) + "\n")
    held = {
        "model": {"path": "m"},
        "data": {"train": "q.jsonl", "eval": "q.jsonl"},
        "retriever": {"url": "http://127.0.0.1:1", "start_timeout_seconds": 1},
    }
    (tmp_path / "c.yaml").write_text(json.dumps(held))
    return "c.yaml"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("warm-start", "--out", f"{CLOSED}/x"), f"--out {CLOSED}/x: its folder: cannot be written to"),
        (("eval", "--out", f"{CLOSED}/x.json"), f"--out {CLOSED}/x.json: its folder: cannot be written to"),
        (("eval", "--answers", f"{CLOSED}/x"), f"--answers {CLOSED}/x: its folder: cannot be written to"),
    ],
)
def test_the_work_does_not_begin(run, config, words, says):
    status, out, err = run(words[0], "--config", config, *words[1:])
    assert (status, out) == (2, "") and err.startswith(f"unspiral: {says} (") and err.count("\n") == 1


def test_a_folder_that_takes_files_is_left_as_it_was(tmp_path):
    make_folder(tmp_path / "a" / "b", "--out")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_file_in_the_folders_place_is_told_as_ever(tmp_path):
    (tmp_path / "a").touch()
    with pytest.raises(UserError, match=r"^--out: cannot be made \(Not a directory\)$"):
        make_folder(tmp_path / "a" / "b", "--out")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_of_another_user_is_told(tmp_path):
    tmp_path.chmod(0o555)
    with pytest.raises(UserError, match=r"^--out: cannot be written to \(Permission denied\)$"):
        make_folder(tmp_path, "--out")
