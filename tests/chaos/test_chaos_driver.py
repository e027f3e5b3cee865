"""kill -9 of the driver at random moments: resumed each time, the run has the metrics of an undisturbed one,
to the last bit."""

from __future__ import annotations

import random
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from end_to_end import events, finish, laboratory, metrics, reproducible
from runs import asked, kill, run_config, start, until, whole_run

pytestmark = [pytest.mark.chaos, pytest.mark.ray, pytest.mark.timeout(2 * 3600)]

MOST_STEPS = 4
"""That a driver makes before it is killed. What it loses of them is done again."""


def wait_for_a_moment(draw: random.Random, run: Path, process: subprocess.Popen, early: bool) -> str:
    """While it starts, or somewhere in a step, its sync, its record or its checkpoint."""
    if early:
        seconds = draw.uniform(1, 12)
        time.sleep(seconds)
        return f"{seconds:.1f} s after the start"
    last = lambda: next(((s["step"], s["attempt"]) for s in reversed(metrics(run))), None)  # noqa: E731
    seen = last()
    for _ in range(draw.randint(1, MOST_STEPS)):
        seen = until(lambda before=seen: last() if last() not in (None, before) else None, process)
    seconds = draw.uniform(0, 0.8)
    time.sleep(seconds)
    return f"{seconds:.2f} s after step {seen[0]}"


def test_kill_9_of_the_driver_at_random_moments_changes_no_metric(folder, amount):
    files, draw = laboratory(folder), random.Random(amount["seed"])
    steps = {"steps": (MOST_STEPS + 3) * amount["kills"], "checkpoint_every": 3}
    calm = whole_run(run_config(files, folder, "whole", trainer=steps), folder / "whole", steps["steps"])
    config, run = run_config(files, folder, "killed", trainer=steps), folder / "killed"
    shutil.rmtree(run, ignore_errors=True)
    for n in range(amount["kills"]):
        process = start(config, *(("--resume", "latest") if n else ()))
        moment = wait_for_a_moment(draw, run, process, early=n % 4 == 3)
        assert process.poll() is None, process.communicate()[0]
        kill(process)
        print(f"kill {n + 1}: {moment}; {len(metrics(run))} steps recorded")
    code, out = finish(start(config, "--resume", "latest"), 1800)
    assert code == 0, out
    whole, after = metrics(calm), metrics(run)
    print(f"{len(after)} steps, {len(events(run, 'resume')) + 1} attempts")
    assert [reproducible(s) for s in after] == [reproducible(s) for s in whole]
    assert asked(run) == asked(calm)
