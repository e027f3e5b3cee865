"""Names and places of runs: what a name may be, and which run a word on the command line means."""

import json

import pytest
from command_line import run  # noqa: F401

from services.common.errors import UserError
from services.common.runs.paths import run_folder
from trainer.config.schema import load_config

BASE = {"model": {"path": "m"}, "data": {"train": "q.jsonl"}, "retriever": {"url": "http://a"}}


@pytest.fixture
def file(tmp_path):
    (tmp_path / "c.yaml").write_text(json.dumps(BASE))
    return tmp_path / "c.yaml"


IN_WORDS = "expected letters, digits, dot, dash and underscore, a letter or digit first"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("latest", "`latest` means the newest run on the command line; choose another name (got 'latest')"),
        (
            "best",
            "`best` means a run's best checkpoint on the command line; choose another name (got 'best')",
        ),
        ("a/b", f"{IN_WORDS} (got 'a/b')"),
        ("with space", f"{IN_WORDS} (got 'with space')"),
        ("..", f"{IN_WORDS} (got '..')"),
        ("x" * 129, f"expected at most 128 characters (got '{'x' * 129}')"),
    ],
)
def test_a_name_that_no_command_could_mean_is_refused_in_words(file, name, why):
    with pytest.raises(UserError) as refused:
        load_config(file, [f"run.name={name}"])
    assert str(refused.value) == f"run.name: {why}"


@pytest.mark.parametrize("name", ["later", "latest-2", "metrics.jsonl", "a.b", "x" * 128])
def test_other_names_are_taken(file, name):
    assert load_config(file, [f"run.name={name}"]).run.name == name


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A run `docs` in `runs`, where the current folder has another folder of that name."""
    monkeypatch.chdir(tmp_path)
    for name in ("docs", "run"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "docs").mkdir()
    return tmp_path / "runs"


def test_a_name_is_a_run_where_a_folder_of_that_name_holds_none(runs, tmp_path):
    assert run_folder("docs", tmp_path / "runs") == runs / "docs"
    assert str(run_folder("./docs")) == "docs"  # said as a path, it is one
    (tmp_path / "docs" / "metrics.jsonl").write_text("{}\n")
    assert str(run_folder("docs")) == "docs"


def test_a_file_that_is_there_is_the_file(runs, tmp_path):
    (tmp_path / "run").write_text("{}\n")
    assert str(run_folder("run")) == "run"


def test_trajectories_are_shown_in_words_where_the_store_is_broken(run, runs):
    folder = runs / "run"
    (folder / "trajectories").mkdir()
    line = {
        "uid": "000001-0000-00", "group": "g", "question": "who?", "golden_answers": ["Ada"],
        "data_source": "quiz", "reward": 1.0, "finish": "answer", "worker": "w0",
        "segments": [{"by": "model", "text": "<answer> Ada </answer>", "kind": "answer"}],
    }  # fmt: skip
    (folder / "trajectories" / "step_000001.jsonl").write_text(json.dumps(line) + "\n")
    (folder / "likelihood.db").write_text("junk")
    status, out, err = run("trajectories", "show", "run", "1")
    assert status == 0 and "<answer> Ada </answer>" in out
    assert err == (
        "note: likelihood store runs/run/likelihood.db: a file, and no SQLite database; give another file; "
        "tokens and what the update did to them are left out\n"
    )
