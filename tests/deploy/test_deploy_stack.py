"""The part of docker-compose.yml without torch, in real containers: retriever, Redis and likelihood service,
killed and brought back."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

LIMIT_SECONDS = 400


@pytest.mark.timeout(LIMIT_SECONDS + 90)
def test_services_come_up_in_containers_survive_kills_and_keep_their_data(tmp_path_factory):
    if not os.environ.get("UNSPIRAL_TEST_CONTAINERS"):
        pytest.skip("starts containers: set UNSPIRAL_TEST_CONTAINERS=1, or run make test-compose")
    work = Path(os.environ.get("COMPOSE_WORK") or tmp_path_factory.mktemp("stack"))
    check = subprocess.Popen(
        ["tests/compose/engine.sh", work, sys.executable, "tests/compose/check_stack.py", work, "small"],
        cwd=ROOT,
        env=os.environ | {"PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = check.communicate(timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:  # an engine that was started is ended by the script's own trap
        os.killpg(check.pid, signal.SIGTERM)
        try:
            out, err = check.communicate(timeout=60)
        finally:
            if check.poll() is None:
                os.killpg(check.pid, signal.SIGKILL)
        pytest.fail(f"not done within {LIMIT_SECONDS} s:\n{out[-3000:]}\n{err[-3000:]}")
    finally:
        if "COMPOSE_WORK" not in os.environ:
            shutil.rmtree(work / "engine", ignore_errors=True)  # gigabytes of images
    if check.returncode == 77:
        pytest.skip(err.strip().splitlines()[-1])
    print(out)
    assert check.returncode == 0, f"{out[-3000:]}\n{err[-3000:]}"
    assert "small: all of it stands" in out
