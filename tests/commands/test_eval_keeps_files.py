"""`eval` writes its scores and answers over nothing that it reads, and not over each other."""

import json

import pytest
from command_line import run  # noqa: F401


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A configuration with held-out questions, in the current folder; what is there and must stay so."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "held.jsonl").write_text(json.dumps({"question": "who?", "golden_answers": ["Ada"]}) + "\n")
    config = {
        "model": {"path": "m"},
        "data": {"train": "t.jsonl", "eval": "held.jsonl"},
        "retriever": {"url": "http://127.0.0.1:1"},
    }
    (tmp_path / "c.yaml").write_text(json.dumps(config))
    (tmp_path / "link.json").symlink_to("held.jsonl")
    return {name: (tmp_path / name).read_bytes() for name in ("held.jsonl", "c.yaml")}


@pytest.mark.parametrize("option", ["--out", "--answers"])
@pytest.mark.parametrize(
    ("file", "more", "reads"),
    [
        ("held.jsonl", (), "data.eval"),
        ("held.jsonl", ("--data", "held.jsonl"), "--data"),
        ("link.json", (), "data.eval"),
        ("./c.yaml", (), "--config"),
    ],
)
def test_what_is_read_is_not_written_over(run, files, tmp_path, option, file, more, reads):
    shown = file.removeprefix("./")
    expected = f"unspiral: {option} {shown}: is what {reads} reads; give another file to write\n"
    assert run("eval", "--config", "c.yaml", *more, option, file) == (2, "", expected)
    assert {name: (tmp_path / name).read_bytes() for name in files} == files


def test_scores_and_answers_are_two_files(run, files):
    words = ("eval", "--config", "c.yaml", "--out", "s.json", "--answers", "./s.json")
    assert run(*words) == (2, "", "unspiral: --answers s.json: is --out too; give two files\n")
