"""Which template a run takes: a known one, or one of the user's own."""

from __future__ import annotations

import sys

import pytest
from rollout_fakes import byte_bpe
from test_rollout_loop import LAB

from services.common.errors import UserError
from services.rollout.worker.templates import make_template
from services.settings import RolloutSettings


def test_an_unknown_template_is_refused_with_what_is_accepted():
    with pytest.raises(UserError, match="expected search_r1, hermes, llama3, lab, or an import path") as e:
        make_template("serch", LAB, RolloutSettings())
    assert e.value.exit_code == 2
    with pytest.raises(UserError, match="cannot be imported"):
        make_template("nowhere.at_all:Thing", LAB, RolloutSettings())
    with pytest.raises(UserError, match="lacks"):
        make_template("rollout_fakes:not_a_template", LAB, RolloutSettings())
    with pytest.raises(UserError, match="max_obs_tokens=16"):
        make_template("search_r1", byte_bpe(["x"], merges=0), RolloutSettings(max_obs_tokens=16))


def test_a_template_of_ones_own_is_taken_by_import_path():
    template = make_template("services.rollout.worker.templates.lab:LabTemplate", LAB, RolloutSettings())
    assert template.stop == ("</search>", "</answer>")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("class T(:\n", "cannot be imported: SyntaxError: "),
        ("raise OSError('no\\nfile')\n", "cannot be imported: OSError: no file ("),
        (
            "class T:\n    pass\n",
            "expected a class that is made from a tokenizer and the settings, found T(): too many",
        ),
        (
            "from services.rollout.worker.templates.base import TagTemplate\n"
            "class T(TagTemplate):\n    head, tail, invalid = '<information>', '</information>', 'no'\n",
            "lacks prompt_ids, documents; see services.rollout.worker.templates.base.Template",
        ),
        (
            "from services.rollout.worker.templates.base import TagTemplate\n"
            "class T(TagTemplate):\n    head, tail, invalid = '<information>', '</information>', 'no'\n"
            "    def prompt_ids(self, question):\n        return []\n",
            "lacks documents; see",
        ),
        (
            "from services.rollout.worker.templates.base import TagTemplate\n"
            "class T(TagTemplate):\n    head, tail, invalid = '<information>', '</information>', 'no'\n"
            "    def prompt_ids(self, question):\n        return []\n"
            "    def observation_ids(self, hits, budget):\n        return self.notice()\n",
            None,
        ),
        ("from services.rollout.worker.templates.lab import LabTemplate as T\n", None),
    ],
)
def test_a_template_in_the_current_folder_is_found_and_its_faults_are_one_line(
    tmp_path, monkeypatch, text, says
):
    name = f"my_template_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    if says is None:
        assert make_template(f"{name}:T", LAB, RolloutSettings()).stop == ("</search>", "</answer>")
        return
    with pytest.raises(UserError) as e:
        make_template(f"{name}:T", LAB, RolloutSettings())
    assert says in str(e.value) and "\n" not in str(e.value)
