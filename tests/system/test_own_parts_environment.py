"""docs/extend.md: which variables a part sees in a run's own Ray, and where its prints lie."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from end_to_end import ENVIRONMENT
from places import ROOT

PAGE = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
RUN = """
import logging, os, ray
from services.local_ray import local_ray

class Part:
    def told(self):
        print("a print of a part")
        logging.getLogger("mine").warning("a warning of a part")
        logging.getLogger("mine").info("nobody reads this")
        return os.environ.get("JUDGE_KEY"), os.getpid()

with local_ray(include_dashboard=False, log_to_driver=False, num_cpus=1):
    # As workers and learner ranks are started: with variables of their own beside the driver's.
    actor = ray.remote(Part).options(runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}}).remote()
    print(*ray.get(actor.told.remote()))
"""


@pytest.fixture
def temporary():
    """A TMPDIR with a short name: Ray's sockets lie below it."""
    folder = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_a_part_sees_a_key_of_the_driver_and_its_prints_lie_where_the_page_says(temporary):
    kept = {k: v for k, v in ENVIRONMENT.items() if k not in ("RAY_ADDRESS", "RAY_TMPDIR")}
    given = kept | {"JUDGE_KEY": "of-driver", "TMPDIR": str(temporary)}
    ended = subprocess.run(
        [sys.executable, "-c", RUN], env=given, cwd=ROOT, capture_output=True, text=True, timeout=270
    )
    assert ended.returncode == 0, ended.stderr
    key, pid = ended.stdout.split()
    assert key == "of-driver"
    assert "of a part" not in ended.stderr
    (logs,) = set(re.findall(r"`(/tmp/unspiral-UID/ray/session_latest/logs/)`", PAGE))
    there = Path(logs.replace("UID", str(os.getuid())).replace("/tmp", str(temporary), 1))
    (out,), (err,) = there.glob(f"worker-*{pid}.out"), there.glob(f"worker-*{pid}.err")
    assert "a print of a part\n" in out.read_text()
    written = err.read_text()
    assert "a warning of a part\n" in written and "nobody reads this" not in written
    # In Ray's own files stand the variables that are handed on, and no other of the driver's.
    assert not [f for f in there.parent.rglob("*") if f.is_file() and b"of-driver" in f.read_bytes()]
