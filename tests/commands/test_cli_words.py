"""Words of the command line: help by its usual names, slips, and what a shell completes."""

import json

import pytest
from command_line import run  # noqa: F401
from test_cli_grammar import COMMANDS

from services.rollout.worker import templates
from trainer.commands import completion
from trainer.rewards import KINDS


def test_help_has_its_usual_names(run):
    _, whole, _ = run("--help")
    assert run("-h") == run("help") == (0, whole, "")
    _, of_one, _ = run("serve", "retriever", "--help")
    assert run("serve", "retriever", "-h") == run("help", "serve", "retriever") == (0, of_one, "")
    assert "Usage: unspiral serve retriever [OPTIONS] [INDEX]" in of_one


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("train", "--stepss", "4"), "No such option: --stepss; did you mean trainer.steps=...?"),
        (
            ("train", "--num-train-epochs", "4"),
            "No such option: --num-train-epochs; did you mean trainer.steps=...?",
        ),
        (("train", "--learner.lr", "4"), "No such option: --learner.lr; did you mean learner.lr=...?"),
        (("eval", "--limt", "4"), "No such option: --limt; did you mean --limit or evaluation.limit=...?"),
        (("report", "--outt", "4"), "No such option: --outt; did you mean --out?"),
        (
            ("report", "--xyzzy"),
            "No such option: --xyzzy; `unspiral report --help` lists those that there are",
        ),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else "",
)
def test_an_option_that_is_none_is_answered_with_what_was_meant(run, words, line):
    assert run(*words) == (2, "", f"unspiral: {line}\n")


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_arguments_have_capitals_and_each_out_is_o_too(path):
    for parameter in COMMANDS[path].params:
        if parameter.param_type_name == "argument":
            assert parameter.metavar == parameter.metavar.upper() and "{" not in parameter.metavar
        elif "--out" in parameter.opts:
            assert parameter.opts == ["--out", "-o"]


def test_o_is_out(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q.jsonl").write_text('{"question": "q?", "golden_answers": ["a"]}\n')
    assert run("data", "convert", "q.jsonl", "-o", "out.jsonl")[0] == 0
    assert (tmp_path / "out.jsonl").exists()


@pytest.fixture
def complete(run, monkeypatch, tmp_path):
    """What a bash completes behind these words, the last of which may be empty."""
    monkeypatch.chdir(tmp_path)
    for name in ("demo-0", "mine"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").touch()

    def ask(*words):
        monkeypatch.setenv("_UNSPIRAL_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", " ".join(("unspiral", *words)))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        status, out, _ = run()
        return out.split() if status == 0 else status

    return ask


RUNS = ["latest", "demo-0", "mine"]
RUN_FIRST = (
    "report",
    "status",
    "pause",
    "resume",
    "monitor replay",
    "trajectories show",
    "trace",
    "workers list",
)


@pytest.mark.parametrize("command", RUN_FIRST)
def test_a_run_is_completed_wherever_one_is_taken_and_best_is_not_offered(complete, command):
    assert complete(*command.split(), "") == RUNS
    assert complete(*command.split(), "runs/m") == ["runs/mine"]


def test_values_of_a_key_are_completed_in_bash_and_in_zsh(complete):
    train = ("train", "--config", "c.yaml")
    assert complete(*train, "reward.ki") == ["reward.kind="]
    assert complete(*train, "reward.kind", "=") == list(KINDS)
    assert complete(*train, "reward.kind", "=", "em_") == ["em_strict", "em_search_r1"]
    assert complete(*train, "reward.kind=f") == ["reward.kind=f1", "reward.kind=format"]
    assert complete(*train, "rollout.engine=") == ["rollout.engine=vllm", "rollout.engine=transformers"]
    assert complete(*train, "rollout.deterministic=") == [
        "rollout.deterministic=true",
        "rollout.deterministic=false",
    ]
    assert complete(*train, "rollout.workers=") == ["rollout.workers=all"]
    assert complete(*train, "learner.lr=") == complete(*train, "no.such=") == []


def test_the_templates_that_are_completed_are_those_that_there_are():
    assert tuple(templates._KNOWN) == completion.TEMPLATES


def test_every_key_can_be_asked_for_its_values():
    listed = {key: completion.values(key) for key in completion.leaf_keys()}
    assert json.dumps(listed) and listed["algorithm.llds.gate"] == ["action", "response", "token", "random"]
