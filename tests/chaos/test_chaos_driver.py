"""kill -9 of the driver at random moments: resumed each time, the run has the metrics of an undisturbed one, to the last bit."""

from __future__ import annotations

import random
import shutil
import time

import pytest
from end_to_end import events, finish, laboratory, metrics, reproducible
from runs import asked, kill, run_config, start, whole_run

pytestmark = [pytest.mark.chaos, pytest.mark.ray, pytest.mark.timeout(2 * 3600)]

LONGEST_SECONDS = 45
"""Latest moment of a kill, after the start of the driver: some come before its first step."""


def test_kill_9_of_the_driver_at_random_moments_changes_no_metric(folder, amount):
    files, draw = laboratory(folder), random.Random(amount["seed"])
    steps = {"steps": 4 * amount["kills"], "checkpoint_every": 3}
    calm = whole_run(run_config(files, folder, "whole", trainer=steps), folder / "whole", steps["steps"])
    config, run, moments = run_config(files, folder, "killed", trainer=steps), folder / "killed", []
    shutil.rmtree(run, ignore_errors=True)
    for n in range(amount["kills"]):
        process = start(config, *(("--resume", "latest") if n else ()))
        deadline = time.monotonic() + draw.uniform(3, LONGEST_SECONDS)
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert process.poll() is None or process.returncode == 0, process.communicate()[0]
        kill(process) if process.poll() is None else process.communicate()
        moments.append(len(metrics(run)))
    code, out = finish(start(config, "--resume", "latest"), 1800)
    assert code == 0, out
    whole, after = metrics(calm), metrics(run)
    print("steps done at each kill:", moments, "attempts:", len(events(run, "resume")) + 1)
    assert [reproducible(s) for s in after] == [reproducible(s) for s in whole]
    assert asked(run) == asked(calm)
