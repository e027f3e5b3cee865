"""The command line, run in this process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

import pytest
import typer
from places import DATA

from trainer.commands.cli import app, main
from trainer.learner.checkpoint import written_aside

LAB = DATA / "lab"


def leaves(command, path=()):
    """(path, command) of every command that does something."""
    if hasattr(command, "commands"):
        for name, child in command.commands.items():
            yield from leaves(child, (*path, name))
            if hasattr(command.commands, "below"):
                yield from (((*path, name, sub), one) for sub, one in command.commands.below(name).items())
    else:
        yield path, command


COMMANDS = dict(leaves(typer.main.get_command(app)))


@pytest.fixture
def run(capsys) -> Callable[..., tuple[int, str, str]]:
    """Runs `unspiral ARGUMENTS...`: exit status, standard output, standard error."""

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        out = capsys.readouterr()
        return ended.value.code, out.out, out.err

    return call


@pytest.fixture(autouse=True)
def fresh_folder(monkeypatch, tmp_path):
    """Each test begins in an empty folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def runs(tmp_path):
    """Two recorded runs in runs/, the second written last, with a checkpoint each."""
    for age, name in ((100, "demo-0"), (0, "demo-1")):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        shutil.copy(LAB / "grpo_1.jsonl", folder / "metrics.jsonl")
        written = os.stat(folder / "metrics.jsonl").st_mtime - age
        os.utime(folder / "metrics.jsonl", (written, written))
        with written_aside(folder / "checkpoints" / "step_000090") as aside:
            for needed in ("state.json", "learner.json", "model/config.json", "weights/a", "rng/a"):
                (aside / needed).parent.mkdir(exist_ok=True)
                (aside / needed).write_text("{}")
    return tmp_path / "runs"
