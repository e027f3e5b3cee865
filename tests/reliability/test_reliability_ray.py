"""Ray's own processes are killed under a run or an evaluation. A run saves its last step; the last line says
what has died."""

from __future__ import annotations

import json
import re
import time

import psutil
import pytest
from end_to_end import command, finish, metrics
from runs import all_gone, at_step, named, ray_processes, run_config, start, until

from trainer.learner.checkpoint import latest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ray")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("gcs_server", r"Ray's head \(GCS\) at \S+ has died: no answer for 2 s"),
        pytest.param("raylet", r"Ray's raylet on this machine \(pid \d+\) has died", marks=pytest.mark.chaos),
    ],
)
def test_a_run_whose_ray_dies_saves_and_says_so_in_its_last_line(files, folder, name, line):
    config = run_config(files, folder, name, trainer={"steps": 5000, "checkpoint_every": 0})
    process, run = start(config), folder / name
    at_step(run, 2, process)
    children = psutil.Process(process.pid).children(recursive=True)
    named(process, name).kill()
    killed = time.monotonic()
    code, out = finish(process, 120)
    assert code == 3 and time.monotonic() - killed < 55, out
    checkpoint, last = latest(run), metrics(run)[-1]["step"]
    assert checkpoint is not None and checkpoint.name == f"step_{last:06d}"
    saved = rf"unspiral: {line}; go on after step {last} with --resume latest"
    assert re.fullmatch(saved, out.rstrip().splitlines()[-1]), out
    for word in ("Traceback", "state-dump", "\x1b[", "(raylet)"):
        assert word not in out
    assert json.loads((run / "summary.json").read_text())["exit"] == 3
    assert all_gone(children, 30) == []


def test_an_eval_whose_ray_dies_says_so_in_its_last_line_and_leaves_no_process(files, folder):
    config = run_config(files, folder, "eval", evaluation={"limit": 200})
    process = command("eval", "--config", config)
    until(lambda: ray_processes(process, "ray::RolloutWorker"), process)
    children = psutil.Process(process.pid).children(recursive=True)
    named(process, "gcs_server").kill()
    code, out = finish(process, 120)
    assert code == 3, out
    line = r"unspiral: Ray's head \(GCS\) at \S+ has died: no answer for 2 s"
    assert re.fullmatch(line, out.rstrip().splitlines()[-1]), out
    assert "Traceback" not in out
    assert all_gone(children, 30) == []
