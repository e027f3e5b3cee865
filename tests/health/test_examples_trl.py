"""TRL's callback in two real processes: every row of both is stored, under groups that they share."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import httpx
import pytest
from places import PYTHONPATH

from tests.likelihood.likelihood_service import serving

pytest.importorskip("torch")
CHILD = Path(__file__).with_name("trl_child.py")


@pytest.mark.slow
def test_two_processes_of_trl_store_all_their_rows_under_groups_that_they_share(tmp_path):
    with serving(tmp_path) as server:
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        done = subprocess.run(
            [*words, str(CHILD), server.url, str(tmp_path / "spool")],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH},
            capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        rows = httpx.get(f"{server.url}/v1/runs/two/steps/7/trajectories", trust_env=False).json()
        steps = httpx.get(f"{server.url}/v1/runs/two/steps", trust_env=False).json()
    assert len(rows) == 64 and len({row["uid"] for row in rows}) == 64
    assert Counter(row["uid"].split("-")[0] for row in rows) == {"0": 32, "1": 32}
    assert sorted(Counter(row["group"] for row in rows).values()) == [16, 16, 16, 16]
    assert sorted(p.name for p in (tmp_path / "spool").iterdir()) == ["rank-0", "rank-1"]
    last = next(step for step in steps if step["step"] == 7)["metrics"]
    assert last["reward/mean"] == 0.25  # the first process's own
    assert last["probe/lag"] != 0
