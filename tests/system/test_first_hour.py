"""What a newcomer meets: results in words on a terminal, progress, and states that say what they are in one
line."""

import io
import json
import os

import pytest
from command_line import run  # noqa: F401
from rich.console import Console
from suite_rows import asked, trajectory_of

from services.common.files import lock
from services.common.progress import progress_on
from services.control.cli import show
from services.control.records import RunStatus
from trainer.commands.checks import doctor
from trainer.commands.terminal import ending, for_people
from trainer.commands.work import evaluate
from trainer.commands.work.in_words import run_in_words, scores_in_words, taught_in_words
from trainer.lab import show as show_demo

ROWS = [
    {"id": "1", "contents": '"Rome"\nRome is the capital of Italy.'},
    {"id": "2", "contents": '"Lima"\nLima is the capital of Peru.'},
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_index_that_is_built_again_says_that_it_was_kept(run, folder):
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    build = ("index", "build", "--corpus", "corpus.jsonl", "--out", "index")
    status, first, err = run(*build)
    assert (status, err) == (0, "") and first.startswith("index: 2 passages, bm25, ")
    status, again, err = run(*build)
    assert (status, again) == (0, first)
    assert err == "index: is the index of this corpus with these settings already; kept as it is\n"
    status, _, err = run(*build, "--overwrite")
    assert (status, err) == (0, "")


def test_a_run_without_steps_is_one_line_in_replay_and_report(run, folder):
    (folder / "fresh").mkdir()
    (folder / "fresh" / "config.yaml").write_text("run: {name: fresh}\n")
    (folder / "fresh" / "metrics.jsonl").touch()
    none_yet = "fresh: no step was recorded yet (a line of metrics.jsonl is written when a step ends)"
    status, _, err = run("monitor", "replay", "fresh")
    assert (status, err) == (2, f"unspiral: {none_yet}, so there is nothing to replay\n")
    status, out, err = run("report", "fresh")
    assert (status, out, err) == (0, "fresh/report.html\n", f"{none_yet}, so its curves are empty\n")


def test_a_run_that_starts_has_a_status_of_one_line(capsys):
    show(RunStatus(state="starting", run="mine", steps=12, seconds=7.2))
    said = "run mine is starting, for 7 s now; its own output says what it waits for\n"
    assert capsys.readouterr().out == said


def test_a_run_whose_control_plane_is_not_up_yet_is_told_from_one_that_has_ended(run, folder):
    (folder / "runs" / "mine").mkdir(parents=True)
    (folder / "runs" / "mine" / "config.yaml").write_text("run: {name: mine}\n")
    with lock(folder / "runs" / "mine" / ".lock"):
        for command in (("status", "latest"), ("workers", "list", "latest"), ("pause", "runs/mine")):
            status, _, err = run(*command)
            holder = f"runs/mine: it is running (process {os.getpid()}) and names no control plane: "
            assert status == 3 and err.startswith(f"unspiral: {holder}it starts or ends (ask again in")
    for command in (("workers", "list", "latest"), ("pause", "runs/mine")):
        status, _, err = run(*command)
        assert status == 2 and "before its first step ended, so no control plane answers for it" in err
    status, out, _ = run("status", "latest")
    assert status == 0 and "mine" in out


def test_the_doctor_tells_a_busy_machine(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.5, 1.0, 2.0))
    (idle,) = doctor.check_load()
    assert (idle.level, idle.seen) == ("good", "0.5 in the last minute, 2.0 in 15, on 2 cores")
    monkeypatch.setattr(os, "getloadavg", lambda: (9.5, 1.0, 2.0))
    (busy,) = doctor.check_load()
    assert busy.level == "note" and "RAY_raylet_start_wait_time_s" in busy.advice
    assert doctor.check_load in doctor.checks_of("workstation")


def test_the_last_line_of_a_command_is_json_for_programs_and_words_come_before_it(monkeypatch):
    result = {"steps": 2, "report": "r.html"}
    assert ending("2 steps\nreport: r.html", result, as_json=True) == json.dumps(result)
    *words, last = ending(
        "2 steps\nreport: r.html", result, as_json=False
    ).splitlines()  # a pipe, under pytest
    assert words == ["2 steps", "report: r.html"] and json.loads(last) == result
    monkeypatch.setattr("sys.stdout", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})())
    assert ending("2 steps", result, as_json=False) == "2 steps"


def test_train_prints_nothing_but_json_on_stdout_with_json(run, tmp_path, monkeypatch):
    import trainer.session.run

    def made(settings, console=None, **_):
        (console or Console()).print("step 1")
        return {"steps": 1, "phase": "unknown", "seconds": 1.0}

    monkeypatch.setattr(trainer.session.run, "train", made)
    config = tmp_path / "c.yaml"
    config.write_text(
        "model: {path: 'lab:0'}\ndata: {train: 'lab:train_questions:0'}\n"
        "retriever: {corpus: 'lab:corpus:0'}\nrun: {dir: runs}\n"
    )
    status, out, err = run("train", "--config", str(config), "--json")
    assert status == 0 and "step 1" in err and json.loads(out)["report"].endswith("report.html")
    status, out, _ = run("train", "--config", str(config))
    assert status == 0 and out.startswith("step 1\n1 step in 0:01") and json.loads(out.splitlines()[-1])


def test_results_are_words_on_a_terminal_and_json_in_a_pipe(monkeypatch):
    assert not for_people(False)  # under pytest
    monkeypatch.setattr("sys.stdout", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})())
    assert for_people(False) and not for_people(True)
    summary = {"steps": 12, "phase": "healthy", "seconds": 182.4, "em_before": 0.125, "em_after": 0.5}
    assert run_in_words(summary) == (
        "12 steps in 3:02, phase healthy\n"
        "exact match on held-out questions, greedily: 0.125 before, 0.500 after "
        "(the number of questions is not known)"
    )
    scores = {
        "overall": {"em": 0.5, "f1": 0.6, "n": 1200},
        "sources": {"nq": {"em": 0.5, "f1": 0.6, "n": 1200}},
    }
    assert scores_in_words(scores).splitlines()[1] == "overall  EM 0.500  F1 0.600  (1,200 questions)"
    done = {"demonstrations": 1000, "steps": 63, "logp_first": -2.5, "logp_last": -0.25}
    assert taught_in_words(done).startswith("1,000 demonstrations, 63 optimiser steps")


def test_long_work_tells_a_log_how_far_it_is_and_short_work_says_nothing():
    log = Console(file=io.StringIO(), width=40)
    with progress_on(log) as tell:
        tell("scan", 0.5, "1,000 passages")
    assert log.file.getvalue() == ""
    with progress_on(log, log_seconds=0.0) as tell:
        tell("scan", 0.5, "1,000 passages")
        tell("seal", 1.0, "")
    assert log.file.getvalue() == "scan: 50%, 1,000 passages\nseal: 100%\n"


def test_a_log_that_was_told_of_a_stage_is_told_its_end_however_soon_it_comes():
    log = Console(file=io.StringIO(), width=40)
    with progress_on(log, log_seconds=0.0) as tell:
        tell("convert", 0.01, "1 of 272")
        tell._seconds = 1000.0
        for stage, share in (("convert", 0.5), ("convert", 1.0), ("convert", 1.0), ("short", 1.0)):
            tell(stage, share, "")
    assert log.file.getvalue().splitlines() == ["convert: 1%, 1 of 272", "convert: 100%"]


def test_a_demo_in_a_log_says_at_once_what_takes_a_minute(tmp_path, monkeypatch):
    log = Console(file=io.StringIO(), width=120)
    seen = []

    def prepare(folder, seed, *, fresh, progress):
        seen.append(log.file.getvalue())
        progress(5, 50, 1.0)
        return "files"

    monkeypatch.setattr(show_demo, "prepare", prepare)
    monkeypatch.setattr(show_demo, "progress_on", lambda console: progress_on(console, log_seconds=0.0))
    assert show_demo.prepared(log, tmp_path, 0, False) == "files"
    assert seen[0].startswith("warm start: teaching the tag format")
    assert log.file.getvalue().splitlines()[-1] == "warm start: 10%, step 5 of 50"


def test_every_answer_of_an_evaluation_is_kept_with_its_searches(tmp_path):
    found = [trajectory_of(asked("nq", n), answer) for n, answer in enumerate(("Rome", None))]
    evaluate.keep_answers(found, tmp_path / "eval" / "answers.jsonl")
    right, silent = map(json.loads, (tmp_path / "eval" / "answers.jsonl").read_text().splitlines())
    assert right["question"] == found[0].question.text and right["scores"]["em"] == 1.0
    assert right["text"] == found[0].model_text and right["answer"] == "Rome"
    assert right["searches"][0]["query"] and right["searches"][0]["documents"]
    assert (silent["answer"], silent["scores"]["em"]) == (None, 0.0)
