"""Small real runs for the tests of reliability: quick engine, few questions, and what can be seen of a run
from outside."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
from end_to_end import ENVIRONMENT, ROOT, command, configuration, finish, metrics
from ray_cluster import alive

QUESTIONS = 10
"""Of training: an epoch ends in the middle of a step."""


def run_config(files, folder: Path, name: str, **sections) -> Path:
    """A deterministic run of 6 steps of 4 x 3 trajectories on the transformers engine, unless told
    otherwise."""
    few = folder / "few.jsonl"
    if not few.exists():
        few.write_text("".join(Path(files.train_questions).read_text().splitlines(keepends=True)[:QUESTIONS]))
    sections["rollout"] = {"engine": "transformers"} | sections.get("rollout", {})
    sections["data"] = {"train": str(few)} | sections.get("data", {})
    sections["control"] = {"port": 0}
    return configuration(files, folder, name, **sections)


def start(config: Path, *arguments, environment=()) -> subprocess.Popen:
    return command("train", "--config", config, *arguments, environment=environment)


def until(condition, process=None, seconds=240.0):
    """What the condition gives once it is true."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if process is not None and process.poll() is not None:
            raise AssertionError(f"it ended with {process.returncode}:\n{process.communicate()[0]}")
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.05)
    return value


def at_step(run: Path, n: int, process) -> None:
    until(lambda: len(metrics(run)) >= n, process)


def kill(process: subprocess.Popen) -> None:
    """kill -9, and wait."""
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()


def ray_processes(process: subprocess.Popen | psutil.Process, title: str) -> list[psutil.Process]:
    """Ray's workers below a process that are titled so, such as ray::RankActor."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            if (words := child.cmdline()) and words[0].startswith(title):
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def named(process: subprocess.Popen, name: str) -> psutil.Process:
    """The oldest process below another that is named so: what it forks has its name until it is another
    program. Others may end meanwhile."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name() == name:
                found.append(child)
    return min(found, key=lambda child: child.create_time())


def all_gone(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Those that are still there after so many seconds."""
    deadline = time.monotonic() + seconds
    while (left := [p for p in processes if alive(p.pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def asked(run: Path) -> dict[str, str]:
    """uid -> question, of every trajectory that was recorded."""
    out: dict[str, str] = {}
    for file in sorted((run / "trajectories").glob("step_*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            trajectory = json.loads(line)
            assert trajectory["uid"] not in out, f"{trajectory['uid']} was scored twice"
            out[trajectory["uid"]] = trajectory["question"]
    return out


def status(run: Path) -> dict:
    """What the run's own control plane says."""
    import httpx

    return httpx.get(json.loads((run / "control.json").read_text())["url"] + "/v1/status", timeout=60).json()


def ask(run: Path, path: str, body=None) -> dict:
    """POST to the run's control plane."""
    import httpx

    answer = httpx.post(json.loads((run / "control.json").read_text())["url"] + path, json=body, timeout=60)
    assert answer.is_success, answer.text
    return answer.json()


def unspiral(*arguments, environment=()) -> tuple[int, str]:
    """A short command: exit status, output."""
    done = subprocess.run(
        [sys.executable, "-m", "trainer", *map(str, arguments)],
        cwd=ROOT,
        env=ENVIRONMENT | {"COLUMNS": "200"} | dict(environment),
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


def whole_run(config: Path, run: Path, steps: int, *, environment=(), timeout: float = 7200) -> Path:
    """The undisturbed run of a configuration; one that lies in the folder already is taken."""
    summary = json.loads((run / "summary.json").read_text()) if (run / "summary.json").exists() else {}
    if (summary.get("exit"), summary.get("steps")) != (0, steps):
        shutil.rmtree(run, ignore_errors=True)
        code, out = finish(start(config, environment=environment), timeout)
        assert code == 0, out
    return run
