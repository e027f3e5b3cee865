"""What stands beside a mistake in its line: the file and line of a key, what was meant, and the command or
the folder that was wanted."""

from __future__ import annotations

import json
import shutil

import pytest
from command_line import fresh_folder, run, runs  # noqa: F401
from ruamel.yaml import YAML

from services.common.runs.paths import in_runs, run_folder
from services.common.users_files import line_of

WHOLE = "model: {path: m}\ndata: {train: t.jsonl}\nretriever: {url: 'http://127.0.0.1:9'}\n"


@pytest.mark.parametrize(
    ("more", "overrides", "lines"),
    [
        ("learner:\n  lr: -1\n", (), ["mine.yaml, line 5: learner.lr: expected above 0 (got -1)"]),
        ("learner:\n  lr: -1\n", ("learner.lr=-2",), ["learner.lr: expected above 0 (got -2)"]),
        (
            "learner:\n\n  lldz: 1\n",
            ("seed=-1",),
            [
                "seed: expected at least 0 (got -1)",
                "mine.yaml, line 6: learner.lldz: unknown key; did you mean algorithm.llds?",
            ],
        ),
        ("lerner: {lr: 1}\n", (), ["mine.yaml, line 4: lerner: unknown key; did you mean learner?"]),
        (
            "algorithm: 3\n",
            (),
            ["mine.yaml, line 4: algorithm: expected a section, such as {loss: ...} (got 3)"],
        ),
        (
            "seed: {count:lamp}\n",
            (),
            [
                "mine.yaml, line 4: seed: count:lamp: a space is missing after the colon; expected "
                "{count: lamp}"
            ],
        ),
        (
            "trainer: {keep_best: true}\n",
            (),
            [
                "mine.yaml: trainer.keep_best needs held-out scores during the run: set trainer.eval_every "
                "above 0 and data.eval"
            ],
        ),
        (
            "",
            ("trainer.keep_best=true",),
            [
                "trainer.keep_best needs held-out scores during the run: set trainer.eval_every above 0 and "
                "data.eval"
            ],
        ),
    ],
)
def test_a_wrong_key_is_told_with_its_file_and_line_and_one_typed_is_not(
    run, tmp_path, more, overrides, lines
):
    (tmp_path / "mine.yaml").write_text(WHOLE + more)
    status, out, err = run("config", "show", "--config", "mine.yaml", *overrides)
    assert (status, out, err.removeprefix("unspiral: ").splitlines()) == (2, "", lines)


def test_sections_that_are_missing_are_one_line_behind_what_is_wrong(run, tmp_path):
    (tmp_path / "mine.yaml").write_text("algorithm: 3\n")
    _, _, err = run("config", "show", "--config", "mine.yaml")
    assert err.splitlines()[1] == "mine.yaml: model, data, retriever: required, and not given"
    assert err.count("\n") == 2


def test_the_line_of_a_key_is_that_of_its_name():
    text = "# first\na:\n  b: [x,\n    {c: 1}]\n3: y\n"
    places = (("a",), ("a", "b"), ("a", "b", 1), ("a", "b", 1, "c"), (3,), ("a", "z"), ())
    assert [line_of(text, key) for key in places] == [2, 3, 4, 4, 5, None, None]


def test_a_file_is_read_once_for_the_lines_of_many_mistakes(run, tmp_path, monkeypatch):
    composed = []
    compose = YAML.compose
    monkeypatch.setattr(YAML, "compose", lambda self, text: composed.append(text) or compose(self, text))
    wrong = "".join(f"  key{number}: 1\n" for number in range(9))
    (tmp_path / "mine.yaml").write_text(f"{WHOLE}learner:\n{wrong}")
    _, _, err = run("config", "show", "--config", "mine.yaml")
    lines = [line.removeprefix("unspiral: ").partition(": ")[0] for line in err.splitlines()]
    assert lines == [f"mine.yaml, line {number}" for number in range(5, 14)]
    assert len(composed) == 1


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("learner.llds.lamda", "no key llds; did you mean algorithm.llds.lambda?"),
        ("learner.lldz", "no key lldz; did you mean algorithm.llds?"),
        ("algorithm.llds.lamda", "no key lamda; did you mean lambda?"),
        ("lerner.lr", "no key lerner; did you mean learner.lr?"),
        ("learner.kl_coef", "no key kl_coef; did you mean algorithm.kl?"),
    ],
)
def test_explain_guesses_in_all_sections(run, key, says):
    assert run("config", "explain", key) == (2, "", f"unspiral: config explain {key}: {says}\n")


def test_a_way_up_is_not_shown_and_leads_out_of_a_run(run, runs, tmp_path):
    for given in ("runs/demo-1/..", "demo-1/..", "runs/demo-1/../"):
        status, out, _ = run("runs", given)
        assert status == 0 and "runs/demo-1 " in out and "runs/demo-0 " in out and ".." not in out
        status, _, err = run("monitor", "replay", given)
        assert status == 2 and err.startswith("unspiral: runs: no run's folder: ")
    assert str(run_folder("demo-1/checkpoints/..")) == "runs/demo-1"
    (tmp_path / "far" / "away").mkdir(parents=True)
    (tmp_path / "link").symlink_to("far/away")
    assert str(in_runs("link/..")) == "link/..", "that is far, and not this folder"


@pytest.mark.parametrize("command", [("monitor", "replay"), ("report",)])
@pytest.mark.parametrize(
    "name", ["config.yaml", "summary.json", "events.jsonl", "trajectories/step_000001.jsonl"]
)
def test_a_file_of_a_run_that_is_not_its_metrics_names_the_run(run, runs, command, name):
    file = runs / "demo-1" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("{}\n")
    expected = (
        f"unspiral: runs/demo-1/{name}: holds no metrics; expected a run's folder or its metrics.jsonl: "
        "runs/demo-1, or runs/demo-1/metrics.jsonl\n"
    )
    assert run(*command, f"runs/demo-1/{name}") == (2, "", expected)


def test_metrics_of_another_trainer_may_have_any_other_name(run, runs):
    shutil.copy(runs / "demo-1" / "metrics.jsonl", runs / "events.jsonl")
    status, out, _ = run("monitor", "replay", "runs/events.jsonl")
    assert status == 0 and out.startswith("events: 90 steps")


def test_trajectories_that_are_compared_name_the_command_for_them(run, runs):
    line = {"uid": "a", "group": "a", "question": "q", "segments": [], "finish": "answer", "reward": 0.0}
    folder = runs / "demo-1" / "trajectories"
    folder.mkdir()
    for name in ("eval_before_greedy", "eval_after_greedy"):
        (folder / f"{name}.jsonl").write_text(json.dumps(line) + "\n")
    before, after = (f"demo-1/trajectories/eval_{when}_greedy.jsonl" for when in ("before", "after"))
    assert run("eval", "compare", before, after) == (
        2,
        "",
        "unspiral: eval compare: eval_before_greedy.jsonl and eval_after_greedy.jsonl are a run's own "
        "trajectories; `unspiral trajectories diff runs/demo-1 eval_before_greedy eval_after_greedy` "
        "compares them\n",
    )
    status, _, err = run("eval", "compare", before, "elsewhere.answers.jsonl")
    assert status == 2 and err.count("\n") == 1
    assert "line 1: not a row of answers that `unspiral eval` writes, but a trajectory of a run; " in err
    assert "`unspiral trajectories diff runs/demo-1 eval_before_greedy OTHER` compares" in err
