"""What `eval` and `warm-start` say in a log: how far they are, what is missing, and what a signal left."""

import asyncio
import json
import os
import signal
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import run  # noqa: F401
from suite_rows import trajectory_of

from services.common.files import folder_written_aside
from services.common.processes.signals import Stopped
from services.contracts import Question
from trainer.commands.work import evaluate, runs
from trainer.commands.work.evaluate import Answered
from trainer.commands.work.in_words import unsearched_in_words
from trainer.suite.rows import GREEDY, Asked
from trainer.suite.sets import Item

QUESTION = Question("q0", "which town is it?", ("Rome",), "quiz")


def test_answers_are_counted_aloud_in_lines_that_are_seldom_enough_to_read():
    said, now = [], [0.0]
    answered = Answered(10, said.append, lambda: now[0])
    for seconds in (5, 10, 20, 25, 40, 41, 42, 43, 60, 90):
        now[0] = seconds
        answered(None)
    assert said == [
        "3 of 10 answered, 0m47s left",
        "5 of 10 answered, 0m40s left",
        "9 of 10 answered, 0m07s left",
    ]


def test_a_wait_without_any_answer_says_how_many_there_are(monkeypatch):
    monkeypatch.setattr("trainer.commands.work.evaluate.busy", lambda: "; load 9 on 2 cores")
    answered = Answered(2, print, lambda: 0.0)
    assert answered.waits_for() == "an answer; 0 of 2 answered; load 9 on 2 cores"
    answered(None), answered(None)
    assert answered.waits_for() == "the rewards; 2 of 2 answered; load 9 on 2 cores"


def scored(searches, answered, n=10):
    return {
        "overall": {"em": 0.0, "f1": 0.0, "n": n, "searches": searches, "answered": answered},
        "sources": {},
    }


def test_a_model_that_never_searched_is_pointed_to_a_warm_start():
    teach = "; a warm start teaches it to search: unspiral warm-start --config c.yaml --out models/taught"
    assert unsearched_in_words(scored(0, 0), "c.yaml") == (
        f"0 searches in 10 questions: the model writes no tags{teach}"
    )
    assert unsearched_in_words(scored(0, 0.9, n=1), "c.yaml") == (
        f"0 searches in 1 question: the model answers without searching{teach}"
    )
    assert (
        unsearched_in_words(scored(0.1, 0), "c.yaml")
        == unsearched_in_words(scored(0, 0, n=0), "c.yaml")
        == ""
    )


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q.jsonl").write_text('{"question": "q?", "golden_answers": ["a"]}\n')
    raw = {
        "model": {"path": "m"},
        "data": {"train": "q.jsonl", "eval": "q.jsonl"},
        "retriever": {"index": "i"},
    }
    (tmp_path / "c.yaml").write_text(json.dumps(raw))
    return tmp_path


def test_the_hint_stands_beside_the_scores(run, config, monkeypatch):
    monkeypatch.setattr(runs.evaluating, "run_eval", lambda settings, **_: scored(0, 0))
    status, out, err = run("eval", "--config", "c.yaml")
    assert status == 0 and json.loads(out) == scored(0, 0)
    assert err.splitlines()[0] == unsearched_in_words(scored(0, 0), "c.yaml")


def test_a_signal_says_that_nothing_was_written_or_where(run, config, monkeypatch):
    def stopped(*_, **__):
        raise Stopped(signal.SIGINT)

    monkeypatch.setattr(runs.evaluating, "run_eval", stopped)
    monkeypatch.setattr(runs.warming, "run_warm_start", stopped)
    (config / "old.json").write_text("{}")
    assert run("eval", "--config", "c.yaml", "--out", "old.json", "--overwrite")[2] == (
        "unspiral: stopped by SIGINT; no scores were written\n"
    )
    assert run("eval", "--config", "c.yaml") == (
        130,
        "",
        "unspiral: stopped by SIGINT; no scores were written\n",
    )
    teach = ("warm-start", "--config", "c.yaml", "--out", "taught")
    assert run(*teach)[2] == "unspiral: stopped by SIGINT; no model was written to taught\n"
    (config / "taught").mkdir()
    assert run(*teach)[2] == "unspiral: stopped by SIGINT; taught is as it was\n"

    def stopped_at_its_end(_, out, **__):
        with folder_written_aside(out) as aside:
            (aside / "weights").write_text("taught")
        raise Stopped(signal.SIGTERM)

    monkeypatch.setattr(runs.warming, "run_warm_start", stopped_at_its_end)
    for _ in range(2):
        assert run(*teach)[2] == "unspiral: stopped by SIGTERM; written to taught\n"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_scores_are_kept_before_the_system_ends(run, config, monkeypatch, name):
    """That takes seconds, in which a signal, or the end of a job's time, loses them no more."""
    number = signal.Signals[name]

    @asynccontextmanager
    async def served(*_):
        yield SimpleNamespace(eval_questions=[QUESTION], eval_retriever_url=None, pool=None, tokenizer=None)
        os.kill(os.getpid(), number)
        await asyncio.wait_for(asyncio.Event().wait(), 60)

    async def answered(*_, **__):
        return {"overall": {"em": 1.0, "f1": 1.0, "n": 1}, "sources": {"quiz": {}}}, [
            trajectory_of(Asked(Item("q0", "quiz", QUESTION), GREEDY), "Rome")
        ]

    async def about(*_):
        return {}

    monkeypatch.setattr(evaluate, "served", served)
    monkeypatch.setattr(evaluate, "evaluate", answered)
    monkeypatch.setattr(evaluate, "asked_how", about)
    monkeypatch.setattr(evaluate, "weights_digest", lambda folder: "ab12")
    monkeypatch.setattr("trainer.data.models.resolve", Path)
    (config / "m").mkdir()
    status, out, err = run("eval", "--config", "c.yaml", "--out", "x.json")
    assert (status, out) == (128 + number, "")
    assert err.splitlines()[-1] == f"unspiral: stopped by {name}; scores written to x.json"
    assert json.loads((config / "x.json").read_text())["overall"]["em"] == 1.0
    assert len((config / "x.answers.jsonl").read_text().splitlines()) == 1
    err = run("eval", "--config", "c.yaml", "--answers", "y.jsonl")[2]
    assert err.splitlines()[-1] == (
        f"unspiral: stopped by {name}; no scores were printed; answers written to y.jsonl"
    )
