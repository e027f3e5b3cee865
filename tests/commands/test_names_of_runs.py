"""Wherever a run or a checkpoint is given it has the same names: all commands that take one, as a table."""

from pathlib import Path

import pytest
from command_line import fresh_folder, run, runs  # noqa: F401

from services.common.errors import UserError
from services.common.runs.paths import run_folder
from trainer.learner.checkpoint import find

CONFIG = """
model: {path: m}
data: {train: t.jsonl, eval: sets}
retriever: {url: 'http://127.0.0.1:9'}
run: {name: other}
"""
HERE = "runs/demo-1/checkpoints/step_000090"
NAMES = ["demo-1", "runs/demo-1", "demo-1/checkpoints/step_000090", HERE, "demo-1/metrics.jsonl"]
EVAL = ("eval", "--config", "c.yaml")
TAKE_A_CHECKPOINT = {
    "export": ("export", "{}", "out"),
    "ask --checkpoint": ("ask", "--checkpoint", "{}", "who?"),
    "ask": ("ask", "{}", "who?", "rollout.topk=2"),
    "ask alone": ("ask", "{}"),
    "serve agent --checkpoint": ("serve", "agent", "--checkpoint", "{}"),
    "serve agent": ("serve", "agent", "{}", "rollout.topk=2"),
    "displacement": ("displacement", "{}"),
    "eval": (*EVAL, "--checkpoint", "{}"),
    "eval --suite": (*EVAL, "--suite", "search7", "--checkpoint", "{}"),
    "train --resume": ("train", "--config", "c.yaml", "--resume", "{}"),
}
TAKE_A_RUN = {
    "monitor replay": ("monitor", "replay", "{}"),
    "report": ("report", "{}"),
    "status": ("status", "{}"),
    "runs": ("runs", "{}"),
}


@pytest.fixture
def seen(monkeypatch, runs, tmp_path):
    """The first thing that each command does with the checkpoint it has found ends it, with its path."""

    def found(checkpoint, *_, **__):
        raise UserError(f"found {checkpoint}")

    for place in (
        "trainer.commands.work.runs.export_checkpoint",
        "trainer.commands.agent.source._config_of",
        "trainer.commands.work.evaluate.differing",
        "trainer.session.run.go_on_from",
    ):
        monkeypatch.setattr(place, found)
    monkeypatch.setattr("trainer.session.run.models.resolve", lambda path: path)
    (tmp_path / "c.yaml").write_text(CONFIG)
    (tmp_path / "sets" / "nq").mkdir(parents=True)
    (tmp_path / "sets" / "nq" / "test.jsonl").write_text('{"question": "who?", "golden_answers": ["me"]}\n')


@pytest.mark.parametrize("given", NAMES)
@pytest.mark.parametrize("command", TAKE_A_CHECKPOINT)
def test_a_checkpoint_has_the_same_names_in_every_command(run, seen, command, given):
    status, _, err = run(*(word.format(given) for word in TAKE_A_CHECKPOINT[command]))
    assert (status, err.splitlines()[-1]) == (2, f"unspiral: found {HERE}")


@pytest.mark.parametrize("command", [c for c in TAKE_A_CHECKPOINT if not c.startswith(("eval", "train"))])
def test_latest_is_the_run_that_was_written_last(run, seen, command):
    """`eval` and `train` mean the run of their configuration."""
    status, _, err = run(*(word.format("latest") for word in TAKE_A_CHECKPOINT[command]))
    assert (status, err.splitlines()[-1]) == (2, f"unspiral: found {HERE}")


@pytest.mark.parametrize("given", ["demo-1", "runs/demo-1", "latest"])
@pytest.mark.parametrize("command", TAKE_A_RUN)
def test_a_run_has_the_same_names_in_every_command(run, runs, command, given):
    status, out, err = run(*(word.format(given) for word in TAKE_A_RUN[command]))
    assert status == 0 and "demo-1" in out, err


def test_a_run_or_file_in_the_folder_itself_comes_before_one_in_runs(run, runs, tmp_path):
    (tmp_path / "demo-1").mkdir()  # without a run: the one of that name is meant
    assert run_folder("demo-1") == Path("runs/demo-1") and str(find("demo-1")) == HERE
    status, _, err = run("runs", "demo-1")
    assert status == 2 and err.startswith(f"unspiral: demo-1: there is no run in {tmp_path}/demo-1; ")
    (tmp_path / "demo-1" / "metrics.jsonl").touch()
    assert run_folder("demo-1") == Path("demo-1")
    with pytest.raises(UserError, match="checkpoint demo-1: demo-1 has no whole checkpoint"):
        find("demo-1")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("ask",), "ask: no checkpoint is named; expected a checkpoint, a run or latest. Example: unspiral"),
        (
            ("ask", "who wrote Hamlet?"),
            "ask: who wrote Hamlet? names no checkpoint; expected a checkpoint, a",
        ),
        (
            ("serve", "agent", "seed=1"),
            "serve agent: no checkpoint is named; expected a checkpoint, a run or",
        ),
        (("ask", "dmo-1", "who?"), "checkpoint dmo-1: no such folder; did you mean runs/demo-"),
        ((*EVAL, "demo-1"), "override 'demo-1': expected key=value; did you mean --checkpoint demo-1?"),
        (("train", "--config", "c.yaml", "latest"), "did you mean --resume latest?"),
        (
            ("train", "--config", "c.yaml", "--resume", "dmo-1"),
            "no such checkpoint folder; did you mean runs/",
        ),
    ],
)
def test_a_slip_is_answered_with_what_is_expected(run, seen, argv, says):
    status, _, err = run(*argv)
    assert status == 2 and says in err and err.count("\n") == 1, err


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["ask", "demo-"], ["demo-0", "demo-1"]),
        (["ask", "runs/demo-"], ["runs/demo-0", "runs/demo-1"]),
        (["serve", "agent", "lat"], ["latest"]),
        (["ask", "latest", "runs/demo-"], []),
        (["serve", "agent", "latest", "rollout.topk"], ["rollout.topk="]),
    ],
)
def test_a_shell_completes_a_checkpoint_as_the_first_word(run, runs, monkeypatch, words, offered):
    monkeypatch.setenv("_UNSPIRAL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(["unspiral", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    status, out, _ = run()
    assert (status, out.split()) == (0, offered)
