"""An engine's process ends with the worker that it belongs to."""

import contextlib
import signal
import subprocess
import sys
import time

import psutil
import pytest
from places import ROOT

WORKER = """
import subprocess, sys
engine = (
    "import os, time; from services.rollout.engines.owner import end_with; end_with(os.getppid()); "
    "print(os.getpid(), flush=True); time.sleep(60)"
)
subprocess.run([sys.executable, "-c", engine])
"""
BETWEEN = """
import os, psutil, time
from types import SimpleNamespace
from services.rollout.engines import owner
def gone():
    raise psutil.NoSuchProcess(1)
owner.psutil.Process = lambda pid: SimpleNamespace(is_running=lambda: True, status=gone)
owner.end_with(os.getppid())
time.sleep(30)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a stopped process stays")
def test_a_stopped_engine_ends_with_its_worker():
    """A worker whose engine hangs is killed; the memory of the engine's GPU is its successor's."""
    worker = subprocess.Popen([sys.executable, "-c", WORKER], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        engine = psutil.Process(int(worker.stdout.readline()))
        try:
            engine.send_signal(signal.SIGSTOP)
            worker.send_signal(signal.SIGKILL)
            deadline = time.monotonic() + 60
            with contextlib.suppress(psutil.NoSuchProcess):
                while engine.status() != psutil.STATUS_ZOMBIE:
                    assert time.monotonic() < deadline, "it stays"
                    time.sleep(0.02)
        finally:
            if engine.is_running():
                engine.kill()
    finally:
        worker.kill()
        worker.communicate(timeout=60)


def test_an_engine_notices_a_worker_that_goes_between_two_questions_about_it():
    assert subprocess.run([sys.executable, "-c", BETWEEN], cwd=ROOT, timeout=60).returncode == 1
