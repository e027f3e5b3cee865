"""docs/extend.md: each part has its YAML, and the lines of errors are those that are printed."""

from __future__ import annotations

import re
import sys
import tomllib

from command_line import run  # noqa: F401
from places import ROOT
from ruamel.yaml import YAML

from trainer.config.schema import parse_config

PAGE = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```yaml\n(.+?)^```", PAGE, re.M | re.S)


def keys_of(raw, before=""):
    """Keys with dots of a block of YAML. Tools are keys of their own."""
    for name, value in raw.items():
        key = f"{before}{name}"
        if isinstance(value, dict) and key != "rollout.tools":
            yield from keys_of(value, f"{key}.")
        else:
            yield key


def test_each_kind_of_part_is_shown_in_yaml_that_is_read():
    (table,) = re.findall(r"^\| part \| key .+?\n\n", PAGE, re.M | re.S)
    kinds = [re.findall(r"`([\w.]+)`", line.split(" | ")[1]) for line in table.strip().splitlines()[2:]]
    shown = set()
    for block in BLOCKS:
        raw = YAML(typ="safe").load(block)
        shown |= set(keys_of(raw))
        needed = {"model": {"path": "m"}, "data": {"train": "t.jsonl"}, "retriever": {"corpus": "c"}}
        parse_config(needed | raw)
    assert len(kinds) == 7 and [keys for keys in kinds if not set(keys) & shown] == []


def test_lines_of_errors_on_the_page_are_those_that_are_printed(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_project").mkdir()
    (tmp_path / "my_project" / "metrics.py").write_text("def queries(trajectories, rewards): ...\n")
    (tmp_path / "my_project" / "reward.py").write_text("def two(trajectory, extra): ...\n")
    demo = str(ROOT / "examples" / "demo.yaml")
    shown = re.findall(r"^unspiral: .+$", PAGE, re.M)
    of_names, of_arguments, of_modules = shown
    for change, line in (
        ("trainer.metrics=[my_project.metrics:querys]", of_names),
        ("reward.kind=my_project.reward:two", of_arguments),
    ):
        assert run("train", "--config", demo, change) == (
            2,
            "",
            f"{line}\n".replace("/home/me", str(tmp_path)),
        )
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_project"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(tmp_path)])
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    printed = run("train", "--config", demo, "reward.kind=my_project.reward:frugal")
    assert printed == (2, "", of_modules.replace("/home/me", str(elsewhere)) + "\n")


def test_the_names_that_an_installed_unspiral_takes_are_told_alike_and_are_all():
    """Of what the wheel holds; docs/deploy.md says what happens to a package of one of these names."""
    included = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    find = included["tool"]["setuptools"]["packages"]["find"]["include"]
    taken = {name.rstrip("*") for name in find}
    deploy = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    told_by = {PAGE: r"an installed Unspiral takes\s([^(]+)\(", deploy: r"at the top level: ([^.]+)\."}
    for page, words in told_by.items():
        (told,) = re.findall(words, page)
        assert set(re.findall(r"`(\w+)`", told)) == taken
    assert f"takes {['', 'one', 'two', 'three', 'four', 'five'][len(taken)]} names at the top level" in deploy
