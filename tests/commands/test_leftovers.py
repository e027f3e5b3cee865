"""What killed runs leave behind is named, and removed by `unspiral doctor --clean`: theirs alone, and only
once they are dead."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from services.common.processes import semaphores
from services.common.processes.alive import started
from services.weight_sync import shared_memory
from trainer.commands.checks import leftovers
from trainer.commands.checks.doctor import check_leftovers
from trainer.commands.checks.leftovers import OWNER_VARIABLE, find_leftovers


@pytest.fixture
def dead():
    """Process id and mark of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    mark = f"{process.pid}:{started(psutil.Process(process.pid)):.2f}"
    process.communicate()
    return process.pid, mark


@pytest.fixture(autouse=True)
def short_wait(monkeypatch):
    monkeypatch.setattr(leftovers, "SETTLE_SECONDS", 0.1)


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """A folder in the place of /dev/shm and of the temporary folder."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(semaphores, "SHARED_MEMORY", folder)
    monkeypatch.setattr(shared_memory, "_MEMORY", folder)
    monkeypatch.setattr(shared_memory.tempfile, "gettempdir", lambda: str(folder))
    return folder


def sleeper(owner: str, *arguments: str) -> subprocess.Popen:
    """A process that says whom it belongs to, as those of a local Ray do."""
    script = "import signal, sys; print('up', flush=True); signal.pause()"
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        env=os.environ | {OWNER_VARIABLE: owner},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "up\n"
    return process


def what(folders=()) -> list[str]:
    return [leftover.what for leftover in find_leftovers(list(folders))]


def test_processes_of_a_dead_drivers_ray_are_ended_and_those_of_a_living_one_stay(dead, memory):
    me = f"{os.getpid()}:{started(psutil.Process()):.2f}"
    another_of_my_id = f"{os.getpid()}:1.00"
    left, alive, reused, unclear = (sleeper(owner) for owner in (dead[1], me, another_of_my_id, "nonsense"))
    try:
        named = " ".join(what())
        assert f"process {left.pid}," in named and f"process {reused.pid}," in named
        assert f"process {alive.pid}," not in named and f"process {unclear.pid}," not in named
        rows = list(check_leftovers([], clean=True))
        assert {row.level for row in rows} == {"good"}
        assert not psutil.pid_exists(left.pid) and not psutil.pid_exists(reused.pid)
        assert alive.poll() is None and unclear.poll() is None
    finally:
        for process in (left, alive, reused, unclear):
            process.kill()
            process.communicate()


def test_what_ends_by_itself_is_not_left_behind(dead, memory, monkeypatch):
    """A run that has just ended has processes that are about to end."""
    ending, agent = sleeper(dead[1]), sleeper(dead[1], "/x/ray/dashboard/agent.py")
    wait = psutil.wait_procs

    def ends_meanwhile(processes, timeout):
        ending.kill()
        ending.wait()
        return wait(processes, timeout=timeout)

    try:
        assert f"process {ending.pid}," in " ".join(what())
        monkeypatch.setattr(leftovers.psutil, "wait_procs", ends_meanwhile)
        assert not [line for line in what() if f"process {ending.pid}," in line]
        monkeypatch.setattr(leftovers.psutil, "wait_procs", wait)
        assert not [line for line in what() if f"process {agent.pid}," in line]
        monkeypatch.setattr(leftovers, "AGENT_SECONDS", 0.0)  # it has had its time
        monkeypatch.setattr(leftovers, "started", lambda process: float(process.pid == os.getpid()))
        assert [line for line in what() if f"process {agent.pid}," in line]
    finally:
        for process in (ending, agent):
            process.kill()
            process.communicate()


def test_a_clock_that_was_set_makes_no_running_run_a_dead_one(memory, monkeypatch):
    mine = sleeper(f"{os.getpid()}:{started(psutil.Process()):.2f}")
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: 1.0)
    try:
        assert not [line for line in what() if f"process {mine.pid}," in line]
    finally:
        mine.kill()
        mine.communicate()


def test_semaphores_and_weights_of_dead_processes_go_and_those_of_others_stay(dead, memory):
    gone = {f"sem.loky-{dead[0]}-abc_12", f"{shared_memory._prefix()}{dead[0]}-x"}
    stay = {f"sem.loky-{os.getpid()}-abc", "sem.mp-xyz", "sem.loky-", f"sem.loky-{dead[0]}", "psm_1"}
    for name in gone | stay:
        if name.startswith("unspiral"):
            (memory / name).mkdir()
        else:
            (memory / name).touch()
    foreign = memory / f"sem.loky-{dead[0]}-other"
    if os.geteuid() == 0:
        foreign.touch()
        os.chown(foreign, 12345, 12345)
        stay.add(foreign.name)
    assert {Path(each).name for each in what() if not each.startswith("process")} == gone
    assert {row.level for row in check_leftovers([], clean=False)} >= {"note"}
    assert {p.name for p in memory.iterdir()} == gone | stay, "without --clean all of it stays"
    list(check_leftovers([], clean=True))
    assert {p.name for p in memory.iterdir()} == stay


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no /dev/shm")
def test_a_semaphore_that_somebody_has_open_stays(dead):
    """Its maker has ended; the process that was given it has not."""
    script = (
        "import mmap, os, sys; f = os.open(sys.argv[1], os.O_RDWR); "
        "m = mmap.mmap(f, 32); print('up', flush=True); input()"
    )
    file = Path(f"/dev/shm/sem.loky-{dead[0]}-unspiral_test")
    file.write_bytes(bytes(32))
    user = subprocess.Popen(
        [sys.executable, "-c", script, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert user.stdout.readline() == "up\n"
        semaphores.remove_dead_semaphores()
        assert file.exists()
        user.communicate("\n", timeout=60)
        semaphores.remove_dead_semaphores()
        assert not file.exists()
    finally:
        user.kill()
        file.unlink(missing_ok=True)


def test_the_address_of_a_dead_run_goes_and_that_of_a_living_one_stays(dead, memory, tmp_path):
    def run(name, **about):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "control.json").write_text(json.dumps({"run": name, "url": "http://127.0.0.1:9"} | about))
        (folder / ".lock").touch()
        return folder

    run("killed", pid=dead[0], host=socket.gethostname())
    run("older", pid=dead[0])
    run("alive", pid=os.getpid(), host=socket.gethostname())
    run("elsewhere", pid=dead[0], host="another-host")
    run("odd", pid="x")
    held = run("held", pid=dead[0], host=socket.gethostname())
    with open(held / ".lock") as lock:  # as a process of another container does, whose id means nothing here
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        named = [each for each in what([tmp_path / "runs"]) if "control.json" in each]
        assert [Path(each.split(",")[0]).parent.name for each in named] == ["killed", "older"]
        assert "http://127.0.0.1:9 of a dead run" in named[0]
        list(check_leftovers([tmp_path / "runs"], clean=True))
    there = {p.parent.name for p in (tmp_path / "runs").glob("*/control.json")}
    assert there == {"alive", "elsewhere", "odd", "held"}
