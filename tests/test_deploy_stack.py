"""The part of docker-compose.yml without torch, in real containers: retriever, Redis and likelihood service, killed and brought back."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def own_engine():
    return (
        subprocess.run(["docker", "info"], capture_output=True, timeout=30).returncode == 0 if shutil.which("docker") else False
    )


@pytest.mark.timeout(420)
def test_services_come_up_in_containers_survive_kills_and_keep_their_data(tmp_path_factory):
    if not os.environ.get("UNSPIRAL_TEST_CONTAINERS"):
        pytest.skip("starts containers: set UNSPIRAL_TEST_CONTAINERS=1, or run make test-compose")
    if not own_engine():
        if os.geteuid() != 0:
            pytest.skip("no Docker engine answers, and starting one needs root")
        if missing := [name for name in ("dockerd", "debootstrap", "iptables") if not shutil.which(name)]:
            pytest.skip(f"no Docker engine answers, and none can be started: {', '.join(missing)} not on the PATH")
    work = Path(os.environ.get("COMPOSE_WORK") or tmp_path_factory.mktemp("stack"))
    done = subprocess.run(
        ["tests/compose/engine.sh", work, sys.executable, "tests/compose/check_stack.py", work, "small"],
        cwd=ROOT,
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=400,
    )
    if done.returncode == 77:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    print(done.stdout)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert "small: all of it stands" in done.stdout
