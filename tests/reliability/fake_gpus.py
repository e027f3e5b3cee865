"""A cluster with GPUs that are none, which the processes of a test must not see: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

from places import PYTHONPATH


def lines_of(script: str, timeout: float) -> tuple[list[str], tuple[str, str]]:
    """Lines of a program that begin with `saw `, since Ray prints beside it; and all that it wrote."""
    environment = os.environ | {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    environment.pop("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", None)
    for _ in range(3):  # Ray may lose a worker that starts on a busy machine; that is not asked here
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=timeout
        )
        if done.returncode == 0:
            break
    return [line for line in done.stdout.splitlines() if line.startswith("saw ")], (done.stdout, done.stderr)
