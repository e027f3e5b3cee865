"""The address in a killed run's folder, at which another run answers by now."""

import json
import os

import pytest
from command_line import run  # noqa: F401

from services.control import cli
from services.control.records import Done, RunStatus

URL = "http://127.0.0.1:8200"
ACTIONS = [("pause",), ("resume",), ("workers", "scale", "2"), ("workers", "drain", "w0.1")]


@pytest.fixture
def answering(tmp_path, monkeypatch):
    """A function that makes the killed run `dead`, whose process number lives again, and has a control plane
    answer as the given run. Returns what was asked."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UNSPIRAL_CONTROL_URL", raising=False)
    sent = []

    def make(name, folder, host="another"):
        dead = tmp_path / "runs" / "dead"
        dead.mkdir(parents=True)
        (dead / "config.yaml").write_text("trainer: {steps: 9}\n")
        (dead / "metrics.jsonl").write_text('{"step": 1}\n')
        about = {"run": "dead", "url": URL, "pid": os.getpid(), "host": host}
        (dead / "control.json").write_text(json.dumps(about))
        monkeypatch.setattr(cli.httpx, "request", lambda method, url, **_: sent.append((method, url)))
        status = RunStatus(state="running", run=name, folder=folder)
        monkeypatch.setattr(
            cli.gateway,
            "read_answer",
            lambda answer, kind, url: Done(text="done") if kind is Done else status,
        )
        return sent

    return make


@pytest.mark.parametrize("words", [*ACTIONS, ("workers", "list")])
def test_nothing_is_done_to_the_other_run(run, answering, tmp_path, words):
    other = tmp_path / "runs" / "other"
    other.mkdir(parents=True)
    sent = answering("other", str(other))
    assert run(*words, "dead") == (
        2,
        "",
        f"unspiral: runs/dead: {URL}, which its control.json names, is that of run other in {other} by now; "
        "of this one no end was recorded\n",
    )
    assert sent == [("GET", f"{URL}/v1/status")]


def test_a_run_of_the_same_name_elsewhere_is_another_one(run, answering, tmp_path):
    (tmp_path / "elsewhere" / "dead").mkdir(parents=True)
    sent = answering("dead", str(tmp_path / "elsewhere" / "dead"))
    assert run("pause", "dead")[0] == 2 and sent == [("GET", f"{URL}/v1/status")]


def test_its_status_is_what_its_own_folder_says(run, answering, tmp_path):
    (tmp_path / "other").mkdir()
    answering("other", str(tmp_path / "other"))
    assert run("status", "dead") == (
        0,
        f"run dead: cut off, after step 1; its folder: {tmp_path}/runs/dead\n",
        "",
    )


@pytest.mark.parametrize("folder", ["here", "/in/a/container/dead"])
def test_the_run_itself_is_asked_whatever_its_paths_are(run, answering, tmp_path, folder):
    folder = str(tmp_path / "runs" / "dead") if folder == "here" else folder
    sent = answering("dead", folder)
    assert run("pause", "dead") == (0, "done\n", "") and sent[-1] == ("POST", f"{URL}/v1/pause")
