"""How many threads and open files this machine allows, and what is left of the threads.

Where none is left, a library ends with "can't start new thread", or with a message of OpenBLAS that names
everything but the limit; another waits for ever. So a run, the doctor and the benchmarks look first.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
THREADS, THREADS_PER_CORE = 250, 32
"""Of a whole run: 312 on two cores as its engine loads; on 32, 26 runs and measurements that filled a
limit of 32,768 had 1,260 each. Libraries start theirs by the number of cores."""
OPEN_FILES = 4096
"""Below it Ray warns. It raises the soft limit to the hard one by itself."""


class ThreadLimit(NamedTuple):
    """A limit that counts threads, with what is used of it."""

    name: str
    used: int
    most: int
    remedy: str

    @property
    def left(self) -> int:
        return self.most - self.used

    def __str__(self) -> str:
        return f"{self.used:,} of {self.most:,} in use ({self.name})"


def thread_limit() -> ThreadLimit | None:
    """The limit that leaves the least room; None where the system names none."""
    return min(_thread_limits(), key=lambda limit: limit.left, default=None)


def threads_of_a_run() -> int:
    """About so many threads does one run start, all its processes together, with the cores it may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return THREADS + THREADS_PER_CORE * cores


def lack_of_threads() -> str:
    """Where there is no room for the threads of one more run: a line with the remedy. Otherwise ""."""
    limit, wanted = thread_limit(), threads_of_a_run()
    if limit is None or limit.left >= wanted:
        return ""
    return f"threads: {limit}; a run here takes about {wanted:,}: {limit.remedy}"


def most_open_files() -> int | None:
    """Of one process; None where there is no limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if hard == resource.RLIM_INFINITY else hard


def few_open_files() -> tuple[str, str] | None:
    """Where a process may not open as many files as a run's do: how many it may, and the remedy."""
    most = most_open_files()
    if most is None or most >= OPEN_FILES:
        return None
    remedy = f"ulimit -Hn {2 * OPEN_FILES} (as root; in a container --ulimit nofile)"
    return f"at most {most:,} per process", f"{OPEN_FILES:,} are needed: {remedy}"


def lack_of_open_files() -> str:
    """The same as a line; otherwise ""."""
    few = few_open_files()
    return f"open files: {few[0]}; {few[1]}" if few else ""


def _thread_limits() -> Iterator[ThreadLimit]:
    try:
        in_all = int((PROC / "loadavg").read_text().split()[3].partition("/")[2])
    except (OSError, ValueError, IndexError):
        in_all = 0  # not Linux
    for name, remedy in (
        ("kernel.pid_max", "sysctl kernel.pid_max=4194304 (as root)"),
        ("kernel.threads-max", "sysctl kernel.threads-max=4194304 (as root)"),
    ):
        most = _number(PROC / "sys" / name.replace(".", "/"))
        if in_all and most is not None:
            yield ThreadLimit(name, in_all, most, remedy)
    for folder in _cgroups():
        used, most = _number(folder / "pids.current"), _number(folder / "pids.max")
        if used is not None and most is not None:
            remedy = "raise the limit of the container (--pids-limit) or of the unit (TasksMax)"
            yield ThreadLimit("pids.max", used, most, remedy)
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if os.getuid() != 0 and most != resource.RLIM_INFINITY:  # root may exceed it
        yield ThreadLimit("ulimit -u", _of_this_user(), most, "ulimit -u unlimited")


def _cgroups() -> Iterator[Path]:
    """The folders of this process's control group and of those around it, as far as they are seen from
    here."""
    try:
        lines = (PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "pids"):
            continue
        root = CGROUPS / controllers
        folder = root / path.lstrip("/")
        yield from (at for at in (folder, *folder.parents) if at.is_relative_to(root))


def _number(file: Path) -> int | None:
    """None where the file is not there, or says `max`."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _of_this_user() -> int:
    user, total = os.getuid(), 0
    for process in psutil.process_iter(["uids", "num_threads"]):
        about = process.info
        if about["uids"] is not None and about["uids"].real == user:
            total += about["num_threads"] or 0
    return total
