"""`unspiral trajectories` on files that a run has not written, or not whole."""

import json

import pytest
from command_line import run  # noqa: F401

LINE = {
    "uid": "000001-0000-00",
    "group": "g",
    "question": "who?",
    "golden_answers": ["Ada"],
    "data_source": "quiz",
    "reward": 1.0,
    "finish": "answer",
    "worker": "w0",
    "segments": [{"by": "model", "text": "<answer> Ada </answer>", "kind": "answer"}],
}
NO_TRAJECTORIES = [
    '{"uid": "000001-00',
    "[]",
    "null",
    "5",
    json.dumps(LINE | {"segments": None}),
    json.dumps(LINE | {"segments": [1]}),
    json.dumps(LINE | {"segments": [{"by": "model", "text": None}]}),
    json.dumps(LINE | {"question": None}),
    json.dumps(LINE | {"golden_answers": [5]}),
    json.dumps(LINE | {"golden_answers": 5}),
    json.dumps(LINE | {"reward": "high"}),
    json.dumps(LINE | {"uid": 5}),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "mine" / "trajectories"
    folder.mkdir(parents=True)
    (folder.parent / "metrics.jsonl").write_text('{"step": 1}\n')
    (folder / "step_000001.jsonl").write_text(json.dumps(LINE) + "\n")
    return folder


@pytest.mark.parametrize("line", NO_TRAJECTORIES)
def test_a_line_that_is_none_is_left_out(run, folder, line):
    (folder / "step_000001.jsonl").write_text(f"{line}\n{json.dumps(LINE)}\n")
    status, out, err = run("trajectories", "find", "mine", "who")
    assert (status, err) == (0, "") and out.splitlines() == [
        "000001-0000-00  right 1  answer, 0 searches  who? -> Ada"
    ]
    status, out, err = run("trajectories", "show", "mine", "1")
    assert (status, err) == (0, "") and out.count("question: who?") == 1


@pytest.mark.parametrize("name", ["step_abc", "step_-1", "step_", "eval mine ü"])
def test_a_file_of_another_name_is_no_step_and_can_be_shown(run, folder, name):
    (folder / f"{name}.jsonl").write_text(json.dumps(LINE) + "\n")
    (folder / "step_000009.jsonl").mkdir()
    status, out, err = run("trajectories", "show", "mine", name)
    assert (status, err) == (0, "") and "<answer> Ada </answer>" in out
    status, _, err = run("trajectories", "show", "mine", "9")
    assert (status, err) == (
        2,
        f"unspiral: 9: no such trajectories in runs/mine; there are step 1, {name}\n",
    )
