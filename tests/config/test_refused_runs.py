"""A run that is refused before it begins leaves no folder, which `unspiral runs` would list as a run."""

import json

import pytest
from learner_world import make_policy

from services.common.errors import UserError
from trainer.config.schema import parse_config
from trainer.lab import demo as _lab  # noqa: F401  # registers the names of its files (lab:train_corpus:0)
from trainer.loop.run.run_folder import RunFolder
from trainer.session import run as running


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """A configuration that is whole but for what is given."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    make_policy(tmp_path / "model")
    (tmp_path / "q.jsonl").write_text('{"question": "w1 w2", "golden_answers": ["w3"]}\n')
    (tmp_path / "bad.jsonl").write_text('{"question": "w1 w2", "golden_answers": ["w3"]}\n{"question": 1}\n')

    def made(**sections):
        whole = {
            "run": {"dir": str(tmp_path / "runs"), "name": "first"},
            "model": {"path": str(tmp_path / "model")},
            "data": {"train": str(tmp_path / "q.jsonl")},
            "retriever": {"corpus": "lab:train_corpus:0"},
        }
        return parse_config(whole | sections)

    return made


REFUSED = {
    "reward": ({"reward": {"kind": "nowhere.at_all:f"}}, "reward.kind 'nowhere.at_all:f'"),
    "template": ({"rollout": {"template": "nowhere.at_all:F"}}, "rollout.template=nowhere.at_all:F"),
    "tool": ({"rollout": {"tools": {"calc": "nowhere.at_all:f"}}}, "rollout.tools.calc=nowhere.at_all:f"),
    "row": ({"data": {"train": "bad.jsonl"}}, "bad.jsonl, line 2: expected"),
    "model": ({"model": {"path": "."}}, "model.path .: no config.json"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_refused_run_leaves_no_folder(what, settings, tmp_path, capsys):
    sections, says = REFUSED[what]
    with pytest.raises(UserError) as e:
        running.train(settings(**sections))
    assert says in str(e.value)
    assert not (tmp_path / "runs" / "first").exists()
    shown = capsys.readouterr().out
    if what == "row":  # the folder was there by then, and that it is gone is told
        assert "run folder removed: " in shown
    else:
        assert "run folder" not in shown


def test_a_folder_that_was_there_before_keeps_what_it_holds_and_says_how_the_run_ended(settings, tmp_path):
    folder = tmp_path / "runs" / "first"
    folder.mkdir(parents=True)
    with pytest.raises(UserError):
        running.train(settings(data={"train": "bad.jsonl"}))
    assert json.loads((folder / "summary.json").read_text())["exit"] == 2


def test_only_a_folder_that_this_process_made_and_that_holds_nothing_else_is_removed(settings):
    folder = RunFolder(settings())
    folder.open(resume=False)
    folder.event(event="note")
    assert not folder.withdraw() and (folder.path / "events.jsonl").exists()
    folder.close()
    (folder.path / "events.jsonl").unlink()
    again = RunFolder(settings())
    again.open(resume=True)
    assert not again.withdraw() and (folder.path / "config.yaml").exists()
    again.close()


def test_while_a_folder_is_removed_it_is_locked_and_it_can_be_taken_again_at_once(settings):
    first = RunFolder(settings())
    first.open(resume=False)
    with pytest.raises(UserError, match="is in use by another running process"):
        RunFolder(settings()).open(resume=True)
    assert first.withdraw()
    second = RunFolder(settings())
    second.open(resume=False)
    first.close()
    assert (second.path / "config.yaml").exists()
    second.close()
