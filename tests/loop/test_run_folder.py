"""A run's files: whole lines, one owner, and no step twice after a resume."""

import json

import pytest

from services.common.errors import UserError
from services.contracts import Action, Observation, Question, Trajectory
from trainer.config.schema import parse_config
from trainer.loop.run.run_folder import RunFolder


@pytest.fixture
def config(tmp_path):
    return parse_config(
        {
            "run": {"dir": str(tmp_path), "name": "r"},
            "model": {"path": "m"},
            "data": {"train": "t"},
            "retriever": {"corpus": "c"},
        }
    )


def steps_of(folder):
    return [json.loads(line)["step"] for line in folder.metrics_path.read_text().splitlines()]


def test_metrics_are_json_whatever_the_value(config):
    folder = RunFolder(config)
    folder.open(resume=False)
    folder.metrics({"step": 1, "a": float("nan"), "b": float("inf"), "phase": "healthy"})
    assert json.loads(folder.metrics_path.read_text()) == {
        "step": 1,
        "a": None,
        "b": None,
        "phase": "healthy",
    }
    folder.close()


def test_a_resumed_run_forgets_later_steps_and_a_torn_line(config):
    folder = RunFolder(config)
    folder.open(resume=False)
    for step in range(1, 6):
        folder.metrics({"step": step})
        folder.trajectories(step, [], [])
    with open(folder.metrics_path, "a") as f:
        f.write('{"step": 6, "rew')
    folder.close()
    folder = RunFolder(config)
    folder.open(resume=True)
    folder.cut_after(3)
    assert steps_of(folder) == [1, 2, 3]
    assert sorted(p.stem for p in (folder.path / "trajectories").iterdir()) == [
        "step_000001",
        "step_000002",
        "step_000003",
    ]
    folder.metrics({"step": 4})
    assert steps_of(folder) == [1, 2, 3, 4]
    folder.close()


def test_a_copy_that_somebody_made_of_a_steps_trajectories_is_left_alone(config):
    folder = RunFolder(config)
    folder.open(resume=False)
    folder.trajectories(5, [], [])
    copied = folder.path / "trajectories" / "step_000005 (copy).jsonl"
    copied.write_text("mine")
    folder.cut_after(3)
    assert [p.name for p in (folder.path / "trajectories").iterdir()] == [copied.name]
    folder.close()


def test_a_torn_event_is_gone_after_the_folder_is_taken_again(config):
    folder = RunFolder(config)
    assert not folder.begun()
    folder.open(resume=False)
    folder.event("join", worker="w0")
    with open(folder.path / "events.jsonl", "a") as f:
        f.write('{"event": "torn')
    folder.event("join", worker="w1")
    folder.close()
    folder.open(resume=True)
    assert folder.begun()
    folder.event("join", worker="w2")
    folder.close()
    lines = (folder.path / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["worker"] for line in lines] == ["w0", "w1", "w2"]


def test_the_last_step_is_the_last_one_that_was_recorded_whole(config):
    folder = RunFolder(config)
    assert folder.last_step() == 0
    folder.open(resume=False)
    folder.metrics({"step": 9, "a": 1.0})
    folder.metrics({"step": 10, "a": 1.0})
    with open(folder.metrics_path, "a") as f:
        f.write('{"step": 11, "rew')
    assert folder.last_step() == 10
    folder.close()


def test_a_line_after_a_torn_one_stays_whole(config):
    folder = RunFolder(config)
    folder.open(resume=False)
    (folder.path / "events.jsonl").write_text('{"event": "torn')
    folder.event("join", worker="w0")
    last = (folder.path / "events.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["worker"] == "w0"
    folder.close()


def test_a_folder_has_one_owner_and_is_not_overwritten(config):
    first = RunFolder(config)
    first.open(resume=False)
    with pytest.raises(UserError, match="in use by another running process"):
        RunFolder(config).open(resume=True)
    first.metrics({"step": 1})
    first.close()
    with pytest.raises(UserError, match="holds a run already"):
        RunFolder(config).open(resume=False)


def test_trajectories_are_written_for_people(config):
    folder = RunFolder(config)
    folder.open(resume=False)
    question = Question("q", "who?", ("Ada",), "nq")
    search = Action([1], [-0.1], 3, "search", "<search>x</search>", "x", ["d1"])
    answer = Action([2], [-0.1], 3, "answer", "<answer>Ada</answer>")
    folder.trajectories(
        1, [Trajectory("u", "g", question, [0], [search, Observation([9], "docs"), answer], "answer")], [1.0]
    )
    record = json.loads((folder.path / "trajectories" / "step_000001.jsonl").read_text())
    assert [s["by"] for s in record["segments"]] == ["model", "environment", "model"]
    assert record["segments"][0]["documents"] == ["d1"]
    assert (record["reward"], record["answer"]) == (1.0, "Ada")
    folder.close()


def test_a_password_of_an_address_does_not_reach_the_folder(config):
    config.store.url = "redis://u:secret@h/0"
    folder = RunFolder(config)
    folder.open(resume=False)
    folder.close()
    text = (folder.path / "config.yaml").read_text()
    assert "secret" not in text
    assert "redis://***@h/0" in text
    assert folder.config.store.url == "redis://u:secret@h/0"
