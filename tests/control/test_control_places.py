"""Which run `status`, `workers`, `pause` and `resume` are for."""

import json
import os
import socket
import subprocess
import sys

import pytest
from command_line import run  # noqa: F401

from services.common.files import lock
from services.common.runs.paths import no_run_in
from services.control import cli, places
from services.control.records import Done, RunStatus, WorkerStatus


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A function that makes a run: under a lock of this process and with an address where it is running."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UNSPIRAL_CONTROL_URL", raising=False)
    held = []

    def make(name, *, url=None, steps=3, age=0, exit=None, pid=None, begun=True):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text("trainer: {steps: 9}\n")
        rows = [json.dumps({"step": n}) + "\n" for n in range(1, steps + 1)]
        (folder / "metrics.jsonl").write_text("".join(rows))
        if exit is not None:
            (folder / "summary.json").write_text(
                json.dumps({"exit": exit, "steps": steps, "phase": "healthy"})
            )
        elif begun:
            held.append(lock(folder / ".lock"))
        if url:
            about = {"run": name, "url": url, "pid": pid or os.getpid(), "host": socket.gethostname()}
            (folder / "control.json").write_text(json.dumps(about))
        for file in ("config.yaml", "metrics.jsonl"):
            os.utime(folder / file, (1_700_000_000 - age,) * 2)
        return folder

    yield make
    for file in held:
        file.close()


@pytest.fixture
def asked(monkeypatch):
    """The requests that were sent; each is granted."""
    sent = []
    worker = WorkerStatus(
        id="w0.1", node="n", pid=7, state="ready", version=1, outstanding_tokens=0, trajectories=0
    )

    def request(method, url, **options):
        sent.append((method, url, options["json"]))
        return url

    def read(answer, kind, url):
        return Done(text="done") if kind is Done else RunStatus(state="running", run="r", workers=[worker])

    monkeypatch.setattr(cli.httpx, "request", request)
    monkeypatch.setattr(cli.gateway, "read_answer", read)
    return sent


ACTIONS = (
    (("pause",), "/v1/pause", None),
    (("resume",), "/v1/resume", None),
    (("workers", "scale", "2"), "/v1/workers/scale", {"n": 2, "ahead": False}),
    (("workers", "drain", "w0.1"), "/v1/workers/w0.1/drain", None),
)


@pytest.mark.parametrize("given", ["mine", "runs/mine", "latest", "http://127.0.0.1:81"])
@pytest.mark.parametrize(("words", "path", "body"), ACTIONS, ids=lambda value: str(value))
def test_each_command_takes_a_run_by_name_folder_latest_or_address(
    run, made, asked, given, words, path, body
):
    made("other", url="http://127.0.0.1:80", age=50)
    made("mine", url="http://127.0.0.1:81")
    assert run(*words, given) == (0, "done\n", "")
    assert asked[-1] == ("POST", f"http://127.0.0.1:81{path}", body)
    assert [url for method, url, _ in asked if method == "POST"] == [asked[-1][1]]


@pytest.mark.parametrize(("words", "path", "body"), ACTIONS, ids=lambda value: str(value))
def test_without_one_the_newest_that_is_running_is_meant_and_named(run, made, asked, words, path, body):
    made("ended", exit=0)
    made("older", url="http://127.0.0.1:80", age=90)
    made("newer", url="http://127.0.0.1:81", age=50)
    assert run(*words) == (0, "done\n", "run: runs/newer, the newest of 2 that are running\n")
    assert asked[-1] == ("POST", f"http://127.0.0.1:81{path}", body)
    assert [url for method, url, _ in asked if method == "POST"] == [asked[-1][1]]


@pytest.mark.parametrize("words", [words for words, *_ in ACTIONS] + [("status",), ("workers", "list")])
def test_without_a_run_that_is_running_nobody_is_asked(run, made, asked, tmp_path, words):
    status, out, err = run(*words)
    assert (status, out) == (2, "")
    assert err == f"unspiral: no RUN is given, and there is no run in {tmp_path}/runs; {places.ACCEPTED}\n"
    made("ended", exit=0)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    made("killed", url="http://127.0.0.1:8200", pid=gone.pid, begun=False)
    assert run(*words)[2] == (
        f"unspiral: no RUN is given, and none of 2 runs in {tmp_path}/runs is running; {places.ACCEPTED}\n"
    )
    assert asked == []


def test_the_address_of_the_environment_holds_where_no_run_is_given(run, made, asked, monkeypatch):
    made("mine", url="http://127.0.0.1:81")
    monkeypatch.setenv("UNSPIRAL_CONTROL_URL", "http://gateway:8200")
    assert run("pause") == (0, "done\n", "") and run("pause", "mine") == (0, "done\n", "")
    posts = [url for method, url, _ in asked if method == "POST"]
    assert posts == ["http://gateway:8200/v1/pause", "http://127.0.0.1:81/v1/pause"]


def test_the_status_of_a_run_that_has_ended_is_its_end(run, made, asked, tmp_path):
    made("mine", exit=0)
    made("killed", steps=2, begun=False)
    where = f"its folder: {tmp_path}/runs"
    assert run("status", "runs/mine") == (0, f"run mine: ended, after step 3; {where}/mine\n", "")
    assert run("status", "killed")[1] == f"run killed: cut off, after step 2; {where}/killed\n"
    found = json.loads(run("status", "mine", "--json")[1])
    assert [found[key] for key in ("state", "run", "step", "stage", "phase")] == [
        "ended",
        "mine",
        3,
        "ended",
        "healthy",
    ]
    assert found["tokens_per_s"] is None and found["steps"] == 9 and found["seconds"] is None
    status, out, err = run("pause", "mine")
    assert (status, out) == (2, "") and err == (
        "unspiral: runs/mine: ended after step 3, so no control plane answers for it; `unspiral runs` lists "
        "the runs that are running\n"
    )
    assert asked == []


def test_a_run_that_starts_and_what_is_no_run_are_one_line(run, made, asked, tmp_path):
    made("mine")
    status, _, err = run("status", "mine")
    assert status == 3 and err == (
        f"unspiral: runs/mine: it is running (process {os.getpid()}) and names no control plane: it starts "
        "or ends (ask again in some seconds), or has control.enabled=false\n"
    )
    assert run("pause", "mime")[::2] == (
        2,
        "unspiral: mime: no such run, folder or file; did you mean runs/mine?\n",
    )
    (tmp_path / "notes").mkdir()
    assert run("pause", "notes")[2] == (
        f"unspiral: notes: {no_run_in(tmp_path / 'notes')}; {places.ACCEPTED}\n"
    )
    assert asked == []
