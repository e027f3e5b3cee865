"""The supervisor of a service's worker processes."""

import os
import subprocess
import sys
import threading
from itertools import count
from types import SimpleNamespace

import psutil
import pytest
import uvicorn
from places import PYTHONPATH
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import Multiprocess

from services.common.http import workers as module
from services.common.http.workers import Workers

PARENT = """
import multiprocessing, os, time
from services.common.processes.parent import when_parent_ends

def child():
    when_parent_ends(lambda: os._exit(1))
    print(os.getpid(), flush=True)
    time.sleep(600)

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start()
    process.join()
"""


class Worker:
    """uvicorn's Process without a process behind it."""

    pids = count(1)

    def __init__(self, config, sockets):
        self.pid = next(self.pids)
        self.exitcode = None
        self.started = False
        self.process = SimpleNamespace(is_alive=lambda: self.exitcode is None)

    def start(self):
        self.started = True

    def kill(self):
        if self.exitcode is None:
            self.exitcode = -9

    def join(self):
        assert self.exitcode is not None

    def ping(self, timeout):
        raise AssertionError("a worker is asked for another sign of life: it may have stopped since")


@pytest.fixture
def workers(monkeypatch):
    def begin(self, config, sockets):
        self.config, self.sockets = config, sockets
        self.should_exit, self.signal_queue = threading.Event(), []

    monkeypatch.setattr(Multiprocess, "__init__", begin)  # no handlers of signals
    monkeypatch.setattr(module, "Process", Worker)
    monkeypatch.setattr(Worker, "pids", count(1))
    monkeypatch.setattr(Workers, "_answers", lambda self, process: process.pid not in self.silent)
    gone = []
    supervisor = Workers(uvicorn.Config("none:none"), [], gone.append)
    supervisor.processes = [Worker(None, None), Worker(None, None)]
    supervisor.gone, supervisor.silent = gone, set()
    return supervisor


def pids(workers):
    return [process.pid for process in workers.processes]


def test_a_worker_that_dies_in_the_first_round_is_told_of(workers):
    workers.processes[0].exitcode = 1
    workers.keep_subprocess_alive()
    assert workers.gone == [1] and pids(workers) == [3, 2] and workers.processes[0].started


def test_each_dead_worker_is_told_of_once(workers):
    workers.keep_subprocess_alive()
    assert workers.gone == []
    for dead in workers.processes:
        dead.exitcode = 1
    workers.keep_subprocess_alive()
    workers.keep_subprocess_alive()
    assert sorted(workers.gone) == [1, 2] and pids(workers) == [3, 4]


def test_a_worker_that_gives_no_sign_of_life_is_replaced_in_the_same_round(workers):
    workers.silent.add(2)
    silent = workers.processes[1]
    workers.keep_subprocess_alive()
    assert silent.exitcode == -9 and pids(workers) == [1, 3] and workers.gone == [2]


def test_a_worker_that_cannot_start_ends_the_server_and_gets_no_successor(workers):
    workers.processes[1].exitcode = STARTUP_FAILURE
    workers.keep_subprocess_alive()
    assert workers.should_exit.is_set() and pids(workers) == [1, 2]


def test_once_one_has_served_a_worker_that_cannot_start_is_tried_again_and_the_others_go_on(
    workers, monkeypatch
):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    workers._served = True
    workers.processes[1].exitcode = STARTUP_FAILURE
    workers.keep_subprocess_alive()
    assert not workers.should_exit.is_set() and pids(workers) == [1, 3]
    workers.processes[1].exitcode = STARTUP_FAILURE
    workers.keep_subprocess_alive()
    assert pids(workers) == [1, 3]  # not at once
    now[0] += module.RETRY_SECONDS
    workers.keep_subprocess_alive()
    assert pids(workers) == [1, 4] and not workers.should_exit.is_set()


def test_a_process_does_as_told_when_the_one_that_started_it_is_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
    )
    try:
        child = psutil.Process(int(parent.stdout.readline()))
        assert child.is_running()
    finally:
        parent.kill()
        parent.wait(30)
    psutil.wait_procs([child], timeout=60)
    assert not child.is_running()
