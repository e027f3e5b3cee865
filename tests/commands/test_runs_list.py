"""`unspiral runs`: what somebody finds who comes back after a night of runs."""

import contextlib
import json
import os

import pytest
from command_line import run  # noqa: F401

from services.common.files import lock
from services.common.runs.paths import RUNS, newest_run
from trainer.config.schema import parse_config
from trainer.loop.run.run_folder import RunFolder


def made(folder, age, steps=0, planned=20, exit=None, **summary):
    """A run's folder that was written to `age` seconds ago."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"trainer:\n  steps: {planned}\n")
    rows = [{"step": i, "reward/mean": i / 10, "phase": "healthy"} for i in range(1, steps + 1)]
    if steps > 2:
        rows[2]["eval/em_sampled"] = 0.25
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if exit is not None:
        (folder / "summary.json").write_text(json.dumps({"exit": exit, "steps": steps} | summary))
    for later, name in enumerate(("config.yaml", "metrics.jsonl", "summary.json")):
        if (folder / name).exists():
            os.utime(folder / name, (1_700_000_000 - age + later, 1_700_000_000 - age + later))
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TZ", "UTC")
    return tmp_path / "runs"


def test_the_newest_comes_first_with_its_state_and_scores(run, folder):
    made(folder / "whole", 300, steps=20, exit=0, em_before=0.1, em_after=0.875)
    made(folder / "killed", 200, steps=4)
    made(folder / "sick", 150, steps=5, exit=4)
    made(folder / "broken", 100, steps=0, exit=1)
    going = made(folder / "going", 50, steps=1, planned=100)
    (folder / "no run").mkdir()
    with lock(going / ".lock"):
        status, out, err = run("runs")
    assert (status, err) == (0, "")
    lines = [line.rsplit("  ", 1)[0].split("  ") for line in out.splitlines()]
    assert [[cell.strip() for cell in line if cell.strip()] for line in lines] == [
        ["run", "state", "step", "reward", "held-out", "phase"],
        ["runs/going", "running", "1/100", "0.100", "-", "healthy"],
        ["runs/broken", "failed (1)", "0/20", "-", "-", "-"],
        ["runs/sick", "stopped by the monitor", "5/20", "0.500", "0.250", "healthy"],
        ["runs/killed", "cut off", "4/20", "0.400", "0.250", "healthy"],
        ["runs/whole", "ended", "20/20", "2.000", "0.875", "healthy"],
    ]
    starts = {line.find("20") for line in (line[-16:] for line in out.splitlines()[1:])}
    assert starts == {0}, "the last column is the time"
    status, out, _ = run("runs", "runs/whole", "--json")
    (one,) = json.loads(out)
    assert status == 0 and one["score"] == 0.875 and one["state"] == "ended" and one["step"] == 20


def test_a_run_that_went_on_after_its_end_and_was_killed_is_not_called_ended(run, folder):
    again = made(folder / "again", 100, steps=4, exit=0)
    with (again / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 5}\n')
    (again / "config.yaml").write_text("{")
    assert [one["state"] for one in json.loads(run("runs", "--json")[1])] == ["cut off"]
    assert json.loads(run("runs", "--json")[1])[0]["steps"] is None


def test_a_copied_run_whose_files_have_other_times_ended_as_it_did(run, folder):
    copied = made(folder / "copied", 100, steps=4, exit=0)
    os.utime(copied / "metrics.jsonl", (1_700_000_500, 1_700_000_500))
    assert [one["state"] for one in json.loads(run("runs", "--json")[1])] == ["ended"]


def test_a_run_that_goes_on_has_no_end_before_its_first_new_step(run, folder, tmp_path):
    made(folder / "again", 100, steps=4, exit=0)
    raw = {
        "run": {"name": "again", "dir": str(folder)},
        "model": {"path": str(tmp_path / "model")},
        "data": {"train": str(tmp_path / "q.jsonl")},
        "retriever": {"url": "http://127.0.0.1:1"},
    }
    goes_on = RunFolder(parse_config(raw))
    goes_on.open(resume=True)
    goes_on.close()  # as a kill lets go of the lock, without a summary
    assert [one["state"] for one in json.loads(run("runs", "--json")[1])] == ["cut off"]


def test_where_there_is_no_run_the_line_says_where_runs_go(run, folder):
    status, _, err = run("runs")
    assert status == 2 and err.startswith("unspiral: runs: no such folder; runs go to run.dir/run.name")
    folder.mkdir()
    assert run("runs")[2] == (
        f"unspiral: runs: there is no run in {folder.absolute()}; runs go to run.dir/run.name, by default "
        "runs/NAME\n"
    )


def test_a_run_with_damaged_records_hides_no_other(run, folder):
    made(folder / "good", 300, steps=20, exit=0, em_after=0.875)
    deep = made(folder / "deep", 200, steps=3)
    with (deep / "metrics.jsonl").open("a") as metrics:
        metrics.write("[" * 100_000 + "\n")
    odd = made(folder / "odd", 100, steps=3, exit="zero", em_after="high")
    with (odd / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": "four", "phase": {"a": 1}, "reward/mean": "much"}\n')
    status, out, err = run("runs")
    assert (status, err) == (0, "")
    lines = [line.rsplit("  ", 1)[0].split("  ") for line in out.splitlines()[1:]]
    assert [[cell.strip() for cell in line if cell.strip()] for line in lines] == [
        ["runs/odd", "cut off", "4/20", "0.300", "0.250", "-"],
        ["runs/deep", "cut off", "3/20", "0.300", "0.250", "healthy"],
        ["runs/good", "ended", "20/20", "2.000", "0.875", "healthy"],
    ]


def test_no_name_acts_on_the_terminal(run, folder):
    made(folder / "\x1b[31mred\u202e", 300, steps=1, exit="\x1b[2J")
    status, out, _ = run("runs")
    assert status == 0 and "\x1b" not in out and "\u202e" not in out
    assert "runs/\ufffd[31mred\ufffd" in out and "failed (\ufffd[2J)" in out


@contextlib.contextmanager
def another_user():
    """One that may read what all may. Root reads everything, and sets its own mode aside."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_what_others_keep_to_themselves_hides_no_run(run, folder):
    folder.parent.chmod(0o755)
    made(folder / "mine", 300, steps=20, exit=0)
    made(folder / "locked", 200, steps=3).chmod(0)
    (made(folder / "half", 100, steps=3) / "metrics.jsonl").chmod(0)
    with another_user():
        status, out, err = run("runs")
        newest = newest_run(RUNS)
    (folder / "locked").chmod(0o700)
    assert (status, err) == (0, "")
    states = [line.split("  ")[:2] for line in out.splitlines()[1:]]
    assert states == [["runs/half", "not readable"], ["runs/mine", "ended"]]
    assert newest.name == "half"


@pytest.mark.parametrize(
    ("config", "planned"),
    [
        ("trainer:\n  steps: 7\n", 7),
        ("a: 1\ntrainer:\n\n  # of all\n  lr: 1\n  steps: 7\nrun:\n  steps: 8\n", 7),
        ("trainer: {steps: 7}\n", 7),
        ("run:\n  trainer:\n    steps: 8\n", None),
        ("trainer:\n  steps: [\n", None),
        ("trainer: 5", None),
        ("trainer:", None),
    ],
)
def test_the_steps_that_are_planned(run, folder, config, planned):
    (made(folder / "one", 100, steps=1) / "config.yaml").write_text(config)
    assert [one["steps"] for one in json.loads(run("runs", "--json")[1])] == [planned]
