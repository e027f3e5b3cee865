"""A rank that is shut down leaves nothing behind in its process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from learner_world import make_policy

ROOT = Path(__file__).resolve().parents[2]
ONE_AFTER_THE_OTHER = """
import os, sys, time
from contextlib import suppress
from pathlib import Path
from learner_world import make_batch, make_config, start_rank

def threads():
    found = 0
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it has ended meanwhile
            found += "gloo" in Path(f"/proc/self/task/{task}/comm").read_text()
    return found

def ended():
    until = time.monotonic() + 60
    while threads() and time.monotonic() < until:  # one that was joined is listed for a moment still
        time.sleep(0.01)
    return threads() == 0

for stage in (0, 2):
    config = make_config(sys.argv[1], learner={"zero_stage": stage, "tokens_per_microbatch": 40})
    rank = start_rank(config, sys.argv[1])
    rank.update(make_batch(4), llds_lambda=0.2, answer_beta=1.0, lr_scale=1.0)
    while_it_trains = threads()
    rank.shutdown()
    rank.shutdown()  # a second call does nothing
    print(stage, while_it_trains > 0, ended())
"""


@pytest.mark.slow
def test_a_rank_that_is_shut_down_ends_its_groups_threads_and_another_may_follow(tmp_path):
    """Those that DeepSpeed holds too: a thread of gloo may abort the process while its interpreter ends."""
    paths = [ROOT, ROOT / "tests", ROOT / "tests/learner"]
    done = subprocess.run(
        [sys.executable, "-c", ONE_AFTER_THE_OTHER, str(make_policy(tmp_path))],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert (done.returncode, done.stdout.splitlines()) == (0, ["0 True True", "2 True True"]), done.stderr
