"""How many threads a machine has left, and what the doctor says of it."""

import importlib
import os
import resource
import sys

import pytest

from services.common.processes import host_limits
from trainer.commands.checks import doctor

SYSCTL = "sysctl kernel.pid_max=4194304 (as root)"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Of 32 cores, with 31,000 threads; `set` writes a file of it."""
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    monkeypatch.setattr(host_limits, "PROC", proc)
    monkeypatch.setattr(host_limits, "CGROUPS", groups)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(32)), raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 0)

    def put(name, text):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    put("proc/loadavg", "77.1 40.0 20.0 60/31000 4711\n")
    put("proc/sys/kernel/pid_max", "32768\n")
    put("proc/sys/kernel/threads-max", "2063000\n")
    return put


def test_the_limit_that_leaves_the_least_room_counts(machine):
    limit = host_limits.thread_limit()
    assert (limit.name, limit.used, limit.most, limit.left) == ("kernel.pid_max", 31000, 32768, 1768)
    assert host_limits.threads_of_a_run() == 1274 and host_limits.lack_of_threads() == ""
    machine("proc/loadavg", "77.1 40.0 20.0 60/31495 4711\n")
    assert host_limits.lack_of_threads() == (
        "threads: 31,495 of 32,768 in use (kernel.pid_max); a run here takes about 1,274: " + SYSCTL
    )
    machine("proc/sys/kernel/pid_max", "4194304\n")
    assert host_limits.thread_limit().name == "kernel.threads-max" and not host_limits.lack_of_threads()


@pytest.mark.parametrize(
    ("line", "folder"), [("0::/a/b", "cgroup"), ("9:pids:/a/b", "cgroup/pids")], ids=["v2", "v1"]
)
def test_a_control_group_around_this_one_counts_too(machine, line, folder):
    machine("proc/self/cgroup", f"12:cpu:/other\n{line}\n")
    machine(f"{folder}/a/b/pids.max", "max\n")
    machine(f"{folder}/a/b/pids.current", "10\n")
    machine(f"{folder}/a/pids.max", "1024\n")
    machine(f"{folder}/a/pids.current", "900\n")
    assert host_limits.thread_limit()[:3] == ("pids.max", 900, 1024)
    assert host_limits.lack_of_threads().endswith("(--pids-limit) or of the unit (TasksMax)")


def test_a_users_own_limit_does_not_hold_for_root(machine, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (500, 500))
    assert host_limits.thread_limit().name == "kernel.pid_max"
    monkeypatch.setattr(os, "getuid", lambda: 12345678)
    assert host_limits.thread_limit() == ("ulimit -u", 0, 500, "ulimit -u unlimited")


def test_a_system_without_these_files_has_no_limit_that_is_known(machine, monkeypatch, tmp_path):
    monkeypatch.setattr(host_limits, "PROC", tmp_path / "none")
    assert host_limits.thread_limit() is None and host_limits.lack_of_threads() == ""
    assert [found.what for found in doctor.check_limits()] == []


def test_the_doctor_has_a_row_of_threads_with_the_remedy(machine):
    (good,) = doctor.check_limits()
    assert (good.what, good.level, good.seen, good.advice) == (
        "threads",
        "good",
        "31,000 of 32,768 in use (kernel.pid_max)",
        "",
    )
    machine("proc/loadavg", "77.1 40.0 20.0 60/32700 4711\n")
    (few,) = doctor.check_limits()
    assert (few.level, few.seen) == ("note", "32,700 of 32,768 in use (kernel.pid_max)")
    assert few.advice == f"a run here takes about 1,274: {SYSCTL}"
    assert doctor.check_limits in doctor.checks_of("workstation")
    assert doctor.check_limits in doctor.checks_of("node")


def test_too_few_open_files_are_told(machine, monkeypatch):
    assert host_limits.OPEN_FILES == 4096
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 4096))
    assert host_limits.lack_of_open_files() == ""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, resource.RLIM_INFINITY))
    assert host_limits.lack_of_open_files() == ""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 1024))
    _, files = doctor.check_limits()
    assert (files.what, files.level, files.seen) == ("open files", "note", "at most 1,024 per process")
    assert files.advice.startswith("4,096 are needed: ulimit -Hn 8192")


@pytest.mark.parametrize(
    ("module", "arguments", "name"),
    [
        ("benchmarks.gpu_sync", ["agreement"], "gpu_sync"),
        ("benchmarks.two_gpus", ["--out", "OUT"], "two_gpus"),
        ("benchmarks.gpu.__main__", ["learner", "--out", "OUT"], "benchmarks.gpu"),
    ],
)
def test_a_measurement_without_room_ends_before_it_starts_anything(
    machine, module, arguments, name, tmp_path, monkeypatch, capsys
):
    machine("proc/loadavg", "77.1 40.0 20.0 60/32700 4711\n")
    out = tmp_path / "out"
    given, before = [str(out) if a == "OUT" else a for a in arguments], os.environ.copy()
    monkeypatch.setattr(sys, "argv", [name, *given])
    assert importlib.import_module(module).main() == 3
    said = capsys.readouterr()
    assert said.err.splitlines() == [f"{name}: {host_limits.lack_of_threads()}"]
    assert said.out == "" and not out.exists()
    assert os.environ == before, "what its processes would get is set once it starts some"
