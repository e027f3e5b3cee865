"""The command line, run in this process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

import pytest
from places import DATA

from trainer.commands.cli import main
from trainer.learner.checkpoint import written_aside

LAB = DATA / "lab"


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
