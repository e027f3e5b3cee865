"""The command line: exit status and the one line for a user's mistake."""

import json

import pytest
from command_line import run  # noqa: F401


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("{model: {path: m}, data: {train: t.jsonl}, retriever: {corpus: c.jsonl}}")
    return str(path)


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["trian"], 2, "trian"),
        (["train"], 2, "--config"),
        (["train", "--config", "none.yaml"], 2, "none.yaml"),
        (["export", "nowhere", "out"], 2, "nowhere"),
        (["index", "build", "--corpus", "nowhere.jsonl", "--out", "x"], 2, "nowhere.jsonl"),
        (["data", "validate", "nowhere.jsonl"], 2, "nowhere.jsonl"),
        (["model", "fetch", "gpt-9"], 2, "gpt-9"),
    ],
)
def test_a_mistake_gives_one_line_and_its_status(run, argv, code, says):
    status, _, err = run(*argv)
    assert status == code
    assert says in err
    assert err.count("\n") == 1, err
    assert "Traceback" not in err


def test_an_unknown_key_on_the_command_line_is_status_2(run, config):
    status, _, err = run("config", "show", "--config", config, "learner.lrr=1")
    assert (status, err) == (2, "unspiral: learner.lrr: unknown key; did you mean learner.lr?\n")


def test_the_resolved_configuration_holds_the_override(run, config):
    status, out, _ = run("config", "show", "--config", config, "algorithm.llds.lambda=0.3")
    assert status == 0
    assert "lambda: 0.3" in out


def test_a_model_folder_that_is_none_stops_a_run_before_anything_starts(run, config, tmp_path, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.chdir(tmp_path)
    status, _, err = run("train", "--config", config, "model.path=./nowhere")
    assert status == 2
    assert "./nowhere" in err


def test_the_schema_is_json(run):
    status, out, _ = run("config", "schema")
    assert status == 0
    assert json.loads(out)["properties"]["seed"]["type"] == "integer"
