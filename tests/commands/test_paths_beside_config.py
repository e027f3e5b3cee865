"""A path of a configuration that is not there: `doctor` finds it as `train` does, and where the configuration
lies in another folder the line says what paths are relative to."""

import pytest
from command_line import fresh_folder, run  # noqa: F401

from trainer.commands.checks.doctor import check_config
from trainer.config.schema import load_config
from trainer.data import relative_paths


@pytest.fixture
def other(tmp_path, monkeypatch):
    """A folder with a configuration and what it names; commands run in another one."""
    folder = tmp_path / "other"
    folder.mkdir()
    row = '{"question": "who?", "golden_answers": ["a"]}\n'
    (folder / "train.jsonl").write_text(row)
    (folder / "held.jsonl").write_text(row)
    (folder / "corpus.jsonl").write_text('{"id": "1", "contents": "a"}\n')
    (folder / "small.yaml").write_text(
        "{model: {path: 'lab:0'}, data: {train: train.jsonl, eval: held.jsonl}, "
        "retriever: {corpus: corpus.jsonl}}"
    )
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return folder


def looked(other, *files):
    beside = f"; beside the configuration: {', '.join(str(other / file) for file in files)}" if files else ""
    return f"; paths are relative to the current folder, {other.parent / 'here'}{beside}\n"


def test_commands_say_where_they_looked_and_what_lies_beside_the_configuration(run, other):
    config = ("--config", "../other/small.yaml")
    assert run("eval", *config) == (
        2,
        "",
        f"unspiral: data.eval: held.jsonl: no such file or folder{looked(other, 'held.jsonl')}",
    )
    missing = "data.train: train.jsonl; data.eval: held.jsonl; retriever.corpus: corpus.jsonl"
    files = ("train.jsonl", "held.jsonl", "corpus.jsonl")
    status, _, err = run("train", *config)
    assert (status, err) == (2, f"unspiral: {missing}: no such file or folder{looked(other, *files)}")
    status, _, err = run("train", *config, *(f"data.{key}=none.jsonl" for key in ("train", "eval")))
    assert status == 2 and err.endswith(looked(other, "corpus.jsonl"))
    status, _, err = run("eval", *config, "data.eval=none.jsonl")
    assert (status, err) == (2, f"unspiral: data.eval: none.jsonl: no such file or folder{looked(other)}")
    status, _, err = run("warm-start", *config, "--out", "m")
    assert status == 2 and "corpus.jsonl: no such file" in err and err.endswith(looked(other, "corpus.jsonl"))


def test_the_model_of_a_configuration_elsewhere(run, other):
    (other / "mine").mkdir()
    config = ("--config", "../other/small.yaml")
    questions = str(other / "held.jsonl")
    for words in (("data", "validate", questions, *config), ("train", *config)):
        (other / "small.yaml").write_text(
            f"{{model: {{path: mine}}, data: {{train: {questions}}}, "
            f"retriever: {{corpus: {other / 'corpus.jsonl'}}}}}"
        )
        status, _, err = run(*words)
        assert status == 2 and "model.path mine: no such folder; accepted: " in err
        assert err.endswith(looked(other, "mine"))


def test_nothing_is_said_of_folders_where_the_configuration_lies_in_the_current_one(run, other, monkeypatch):
    monkeypatch.chdir(other)
    for config in ("small.yaml", str(other / "small.yaml")):
        wrong = run("eval", "--config", config, "data.eval=none.jsonl")
        assert wrong == (2, "", "unspiral: data.eval: none.jsonl: no such file or folder\n")


def test_an_error_about_something_else_stays_as_it_is(other):
    config = load_config(other / "small.yaml")
    for line in ("big-held.jsonl: no such file", "held.jsonl.gz: damaged", "lab:0: no such model"):
        with pytest.raises(relative_paths.UnspiralError) as told:
            with relative_paths.looked_for(other / "small.yaml", config):
                raise relative_paths.UnspiralError(line)
        assert str(told.value) == line


WRONG = {
    "model.path": ("no such folder; accepted: a folder in Hugging Face form, "),
    "data.train": "no such file or folder",
    "data.eval": "no such file or folder",
    "retriever.corpus": "no such file or folder",
    "retriever.index": "retriever.index: nowhere: no such folder; ",
}


@pytest.mark.parametrize(("key", "says"), WRONG.items())
def test_the_doctor_finds_each_mistyped_path(run, other, monkeypatch, key, says):
    monkeypatch.chdir(other)
    changed = [f"{key}=nowhere"] + (["retriever.corpus=null"] if key == "retriever.index" else [])
    config = load_config("small.yaml", changed)
    (bad,) = [finding for finding in check_config(other / "small.yaml", config) if finding.level == "bad"]
    assert (bad.what, bad.seen) == (key, "nowhere") and bad.advice.startswith(says)
    status, out, _ = run("doctor", "--config", "small.yaml", *changed)
    assert status == 3 and "ready for" not in out
    assert out.splitlines()[-1].startswith("not ready: see ") and key in out.splitlines()[-1]


def test_the_doctor_names_a_model_whose_folder_lacks_something_once(run, other, monkeypatch):
    monkeypatch.chdir(other)
    (other / "m").mkdir()
    status, out, _ = run("doctor", "--config", "small.yaml", "model.path=m")
    assert status == 3 and out.count("no config.json; expected a folder in Hugging Face form") == 1
    assert "they need the model, not here yet; a run checks them when it starts" in " ".join(out.split())
