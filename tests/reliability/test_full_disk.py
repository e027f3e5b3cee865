"""A disk that is full, or takes no more changes, in mid-run: exit status 3 and the name of the file, wherever
the run writes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from full_disk import fill, read_only, small_disk
from ports import kept_port
from rich.console import Console
from scripted_runs import started
from test_likelihood_client import record
from test_trainer_monitor_actions import Scripted, system

from services.common.errors import EnvironmentLacks
from services.common.files import write_atomically
from services.contracts import Action, Question, TokenBatch, Trajectory
from services.likelihood.client import LikelihoodClient
from services.likelihood.exports.report import write_report
from services.settings import ProbeSettings
from trainer.commands import cli
from trainer.learner.checkpoint import CheckpointNotWritten, written_aside
from trainer.loop.run.run_folder import RunFolder
from trainer.loop.update.probes import Probes
from trainer.session import run as runs
from trainer.session.control import served

LONG = "x" * 20_000


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk") as mounted:
        yield mounted


@pytest.fixture
def made(disk):
    made = system(disk)
    made.folder.metrics({"step": 1, "reward/mean": 0.5})
    yield made
    made.folder.close()


def fixed_probe(made):
    n = 4000
    batch = TokenBatch(
        ["a"],
        np.array([0, n]),
        np.zeros(n, np.int32),
        np.zeros(n, np.int16),
        logp_old=-np.ones(n, np.float32),
    )
    batch.right = np.array([True])
    Probes(ProbeSettings(fixed_size=4), None, "r", made.folder.path).parts(1, batch)


def trajectories(made):
    question = Question("q", LONG, ("Ada",), "nq")
    action = Action([2], [-0.1], 3, "answer", "<answer>Ada</answer>")
    made.folder.trajectories(2, [Trajectory("u", "g", question, [0], [action], "answer")], [1.0])


def control(made):
    made.config.control.enabled, made.config.control.port = True, 0

    async def serve():
        async with served(made.config, made.folder.path, print):
            raise AssertionError("served without an address")

    asyncio.run(serve())


def configuration(made):
    folder = RunFolder(made.config.model_copy(deep=True))
    folder.config.run.name = "other"
    folder.path = folder.config.run_dir
    try:
        folder.open(resume=False)
    finally:
        folder.close()


WRITES = {
    "config.yaml": configuration,
    "metrics.jsonl": lambda made: made.folder.metrics({"step": 2, "phase": LONG}),
    "events.jsonl": lambda made: made.folder.event("alarm", text=LONG),
    "step_000002.jsonl": trajectories,
    "summary.json": lambda made: made.folder.summary({"steps": 1, "phase": LONG}),
    "fixed_probe.npz": fixed_probe,
    "control.json": control,
    "scores.json": lambda made: write_atomically(made.folder.path / "scores.json", LONG),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_full_disk_is_named_with_the_file_wherever_a_run_writes(disk, made, name, capsys, monkeypatch):
    (made.folder.path / "trajectories").mkdir()
    (disk / "other").mkdir()
    fill(disk)
    with pytest.raises(OSError) as caught:
        WRITES[name](made)
    assert caught.value.errno == errno.ENOSPC and caught.value.filename.endswith(f"/{name}")

    def fail(**_):
        raise caught.value

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as left:
        cli.main([])
    assert left.value.code == 3
    assert capsys.readouterr().err == f"unspiral: {caught.value.filename}: No space left on device\n"


def test_so_are_the_report_the_spool_and_the_checkpoint(disk, made):
    spool = disk / "spool"
    client = LikelihoodClient(f"http://127.0.0.1:{kept_port()}", spool_dir=spool, memory_bytes=0)
    fill(disk)
    with pytest.raises(
        EnvironmentLacks, match=f"{spool}: cannot be written .No space left on device"
    ) as full:
        client.post_step("run", record(0, n=200))
    assert full.value.exit_code == 3
    report = made.folder.path / "report.html"
    with pytest.raises(
        EnvironmentLacks, match=f"{report}: cannot be written .No space left on device"
    ) as full:
        write_report([made.folder.path], report)
    assert full.value.exit_code == 3
    target = made.folder.path / "checkpoints" / "step_000002"
    with pytest.raises(CheckpointNotWritten, match=f"{target} cannot be written: .*No space left") as full:
        with written_aside(target) as aside:
            (aside / "state.json").write_text(LONG)
    assert full.value.exit_code == 3 and not target.exists()
    client.close(timeout=0.1)


class Stopping(Scripted):
    """At step 4 something happens to the disk."""

    def __init__(self, system, wants, happens):
        super().__init__(system, wants)
        self.happens = happens

    async def one_step(self, step):
        if step == 4:
            self.happens(self.config.run_dir.parent)
            self.system.folder.trajectories("step_000004", [], [])
            self.system.folder.event("alarm", text=LONG)
        return await super().one_step(step)


@pytest.mark.parametrize(
    ("happens", "line"),
    [
        (fill, r"unspiral: \S+/r/\S+: No space left on device"),
        (read_only, r"unspiral: \S+/r/trajectories\S*: Read-only file system"),
    ],
    ids=["full", "read-only"],
)
def test_a_run_whose_disk_takes_no_more_ends_with_3_and_the_first_file(
    disk, made, happens, line, monkeypatch, capsys, tmp_path
):
    """Not with what fails because of it while the run ends: `control.json`, the summary, the report."""
    made.folder.close()
    made.config.control.enabled, made.config.control.port = True, 0
    made.folder.metrics_path.unlink()
    started(made, monkeypatch, lambda system, wants: Stopping(system, wants, happens))
    monkeypatch.setattr(
        runs, "announced", lambda control, driver: contextlib.nullcontext()
    )  # there is no Ray
    out = io.StringIO()
    train = runs.train
    monkeypatch.setattr(
        runs, "train", lambda config, **_: train(made.config, console=Console(file=out, width=300))
    )
    config = tmp_path / "c.yaml"
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question": "who?", "golden_answers": ["a"]}\n')
    there = {"model": {"path": str(tmp_path)}, "data": {"train": str(questions)}}
    config.write_text(json.dumps(there | {"retriever": {"url": "http://x"}}))
    with pytest.raises(SystemExit) as left:
        cli.main(["train", "--config", str(config)])
    said = capsys.readouterr().err
    assert left.value.code == 3 and re.fullmatch(line, said.strip()), said
    assert "control.json" not in said and re.search(
        "warning: no (summary|report) was written: ", out.getvalue()
    )
    assert "Traceback" not in out.getvalue() + said


def test_so_are_converted_questions(disk, tmp_path, capsys):
    (tmp_path / "q.jsonl").write_text('{"question": "who?", "golden_answers": ["a"]}\n' * 500)
    fill(disk)
    out = disk / "out.jsonl"
    with pytest.raises(SystemExit) as left:
        cli.main(["data", "convert", str(tmp_path / "q.jsonl"), str(out)])
    assert left.value.code == 3 and not out.exists()
    said = f"unspiral: {out}: cannot be written (No space left on device)\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_so_is_the_folder_of_converted_questions(tmp_path, capsys, monkeypatch, number):
    (tmp_path / "q.jsonl").write_text('{"question": "who?", "golden_answers": ["a"]}\n')

    def mkdir(path, *args, **options):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "mkdir", mkdir)
    out = tmp_path / "new" / "out.jsonl"
    with pytest.raises(SystemExit) as left:
        cli.main(["data", "convert", str(tmp_path / "q.jsonl"), str(out)])
    said = f"unspiral: the folder of {out}: cannot be made ({os.strerror(number)})\n"
    assert (left.value.code, capsys.readouterr().err) == (3, said)
