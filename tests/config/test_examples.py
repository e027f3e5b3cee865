"""What a newcomer copies first: the example configurations, and the commands of the README."""

import re
import shlex
from pathlib import Path

import pytest
import typer
from places import ROOT
from ruamel.yaml import YAML

from trainer.commands.cli import app
from trainer.config.schema import load_config, parse_config
from trainer.data.models import resolve_file
from trainer.lab import demo as _lab  # noqa: F401  # registers the names of its files
from trainer.lab.demo import LabFiles, demo_config

EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda f: f.name)
def test_an_example_loads(file):
    assert load_config(file).run.name == file.stem


def value_at(config, key):
    node = config.model_dump(mode="json", by_alias=True)
    for part in key.split("."):
        node = node[part]
    return node


def test_the_two_recipes_hold_the_values_of_the_page():
    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    head = "| key | `examples/paper.yaml` | `examples/released_code.yaml` |\n| --- | --- | --- |\n"
    rows = [re.split(r" *\| *", row)[1:4] for row in page.split(head)[1].split("\n\n")[0].splitlines()]
    paper, code = (load_config(ROOT / "examples" / f"{name}.yaml") for name in ("paper", "released_code"))
    for key, *cells in rows:
        for config, cell in zip((paper, code), cells, strict=True):
            value = value_at(config, key.strip("`"))
            assert (float(cell) if isinstance(value, int | float) else cell) == value, key
    given = YAML(typ="safe", pure=True).load((ROOT / "examples" / "paper.yaml").read_text())
    named = {key.strip("`") for key, *_ in rows} | {"rollout.template"}
    assert {f"{s}.{k}" for s in ("rollout", "learner", "trainer") for k in given[s]} <= named


def test_the_warm_up_of_the_released_code_is_as_long_as_it_says():
    """286 rollout batches, ten optimiser steps each."""
    learner = load_config(ROOT / "examples" / "released_code.yaml").learner
    assert learner.warmup_batches * learner.optimiser_steps_per_batch == 2860 and learner.warmup_steps == 0


def test_the_demo_as_a_file_is_the_demo_as_a_command():
    names = (
        "lab:0",
        "lab:train_corpus:0",
        "lab:train_questions:0",
        "lab:eval_corpus:0",
        "lab:eval_questions:0",
    )
    expected = parse_config(
        demo_config(LabFiles(*map(Path, names)), folder=Path("runs"), name="demo", seed=0)
    )
    assert load_config(ROOT / "examples" / "demo.yaml") == expected


def test_the_demo_file_names_files_that_can_be_made(tmp_path, monkeypatch):
    monkeypatch.setenv("UNSPIRAL_CACHE", str(tmp_path))
    config = load_config(ROOT / "examples" / "demo.yaml")
    named = (config.data.train, config.data.eval, config.retriever.corpus, config.evaluation.retriever.corpus)
    assert len({resolve_file(name) for name in named}) == 4
    assert all(Path(resolve_file(name)).is_file() for name in named)


def commands(text):
    """Commands of ours in fenced and indented blocks (continuation lines joined) and in code within a line,
    as lists of words."""
    fenced = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.M | re.S)
    rest = re.sub(r"^```[^\n]*\n.*?^```", "", text, flags=re.M | re.S)
    inline = [
        " ".join(c.split()) for c in re.findall(r"`([^`]*(?:unspiral |python -m trainer )[^`]+)`", rest)
    ]
    for line in (
        "\n".join([*fenced, *re.findall(r"^ {4}(\S.*)", rest, re.M), *inline])
        .replace("\\\n", " ")
        .splitlines()
    ):
        if "unspiral" not in line and "python -m trainer" not in line:
            continue
        words = shlex.split(line, comments=True)
        while words and re.match(r"^[A-Z_]+=", words[0]):  # variables set for the command
            words.pop(0)
        if words[:3] == ["docker", "compose", "exec"]:
            words = words[4:]
        elif words[:1] == ["kubectl"] and "--" in words:
            words = words[words.index("--") + 1 :]
        cut = next((i for i, w in enumerate(words) if w in ("|", "&&", ";", "&", ">")), len(words))
        for start in (["unspiral"], ["python", "-m", "trainer"], ["$", "unspiral"]):
            if words[: len(start)] == start:
                yield words[len(start) : cut]


def fault(words):
    """Why click would not take these words; None where it would."""
    command = typer.main.get_command(app)
    context = command.make_context("unspiral", [], resilient_parsing=True)
    words = list(words)
    while hasattr(command, "commands"):
        if not words:
            return None
        if words[0].startswith("--"):
            own = {f for p in command.params for f in p.opts} | {"--help"}
            return None if words[0] in own else f"no option {words[0]}"
        if words[0] not in command.commands:
            return f"no command {words[0]}"
        name = words.pop(0)
        command = command.commands[name]
        context = command.make_context(name, [], parent=context, resilient_parsing=True)
    flags = {f for p in command.params for f in (*p.opts, *p.secondary_opts)} | {"--help"}
    words = [w.strip("[]") for w in words]  # [--run NAME]: may be left out
    unknown = [w for w in words if w.startswith("--") and w.split("=")[0] not in flags]
    return f"no option {unknown[0]}" if unknown else None


def test_a_command_that_does_not_exist_is_noticed():
    text = (
        "```\nunspiral train \\\n  --config x.yaml a=1  # so\nunspiral trian\n"
        "UNSPIRAL_CACHE=x python -m trainer demo --fall && ls\n```\n"
    )
    text += (
        "`unspiral demo\n--fell` and `docker compose exec control unspiral statos`:\n\n"
        "    unspiral report RUN [--at F]  # so\n    curl -d '{\n"
    )
    found = list(commands(text))
    assert found[:3] == [["train", "--config", "x.yaml", "a=1"], ["trian"], ["demo", "--fall"]]
    assert found[3:] == [["report", "RUN", "[--at", "F]"], ["demo", "--fell"], ["statos"]]
    noticed = [
        "no command trian",
        "no option --fall",
        "no option --at",
        "no option --fell",
        "no command statos",
    ]
    assert [fault(words) for words in found] == [None, *noticed]


DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHOWN = {file: list(commands(file.read_text(encoding="utf-8"))) for file in DOCUMENTS}


@pytest.mark.parametrize("file", [file for file in DOCUMENTS if SHOWN[file]], ids=lambda f: f.name)
def test_the_commands_of_the_documents_exist(file):
    assert [(words, why) for words in SHOWN[file] if (why := fault(words))] == []


def test_commands_are_found_in_most_documents():
    assert sum(map(bool, SHOWN.values())) > 20 and sum(map(len, SHOWN.values())) > 150
