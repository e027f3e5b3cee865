"""A local Ray that was cut off in its start leaves nothing behind, not even what its raylet has started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from services import local_ray
from services.common.processes.alive import is_alive, started

AGENT = str(Path(local_ray.ray.__file__).parent / "dashboard/agent.py")
ORPHAN = """
import os, subprocess, sys
script = "import signal, sys; sys.stdout.write('up'); sys.stdout.flush(); signal.pause()"
child = subprocess.Popen([sys.executable, "-c", script, *sys.argv[1:]], stdout=subprocess.PIPE)
child.stdout.read(2)
print(child.pid, flush=True)
"""
"""Starts a process, and ends once that is up: it is then nobody's child, as agents are without a raylet."""


def orphan(*arguments: str) -> psutil.Process:
    ended = subprocess.run([sys.executable, "-c", ORPHAN, *arguments], stdout=subprocess.PIPE, text=True)
    return psutil.Process(int(ended.stdout))


@pytest.mark.parametrize("end", ["start", "stop", "at once"])
def test_agents_of_a_ray_that_was_cut_off_in_its_start_are_ended_and_no_other_process(monkeypatch, end):
    monkeypatch.setattr(local_ray.ray, "shutdown", lambda: None)
    theirs = orphan(AGENT)  # of another's Ray: it does not carry this process's mark
    made: list[psutil.Process] = []

    def init(**options):
        made.extend((orphan(AGENT), orphan("ray::IDLE"), orphan("a user's own")))
        if end == "start":
            raise KeyboardInterrupt

    monkeypatch.setattr(local_ray.ray, "init", init)
    try:
        if end == "start":
            with pytest.raises(KeyboardInterrupt):
                local_ray.start_local_ray()
        else:
            local_ray.start_local_ray()
            if end == "at once":
                local_ray.end_what_is_left()
            else:
                local_ray.stop_local_ray()
        agent, worker, own = made
        psutil.wait_procs([agent, worker], timeout=60)
        assert not is_alive(agent) and not is_alive(worker)
        assert is_alive(own) and is_alive(theirs)
    finally:
        local_ray.stop_local_ray()
        for process in (theirs, *made):
            if is_alive(process):
                process.kill()


def test_without_a_ray_of_this_process_nothing_is_ended(monkeypatch):
    monkeypatch.setitem(local_ray._WAS_SET, local_ray.OWNER_VARIABLE, None)
    monkeypatch.delenv(local_ray.OWNER_VARIABLE, raising=False)
    assert local_ray._of_ray() == []


def test_the_start_of_a_process_is_told_by_the_machine_and_not_by_the_clock(monkeypatch):
    mark = local_ray.owner_mark(psutil.Process())
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: 0.0)  # as where the clock was set
    assert local_ray.owner_mark(psutil.Process()) == mark == f"{os.getpid()}:{started(psutil.Process()):.2f}"
