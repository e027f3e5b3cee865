"""Remains of killed runs on this machine, and their removal: only of what is provably a run's, whose run is
dead."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from services.common.files import hints, lock
from services.common.processes.alive import is_alive, started
from services.common.processes.semaphores import dead_semaphores
from services.common.runs.paths import LOCK
from services.common.scratch import left_behind
from services.weight_sync.shared_memory import orphans

OWNER_VARIABLE = "UNSPIRAL_LOCAL_RAY"
"""As in services.local_ray, which needs Ray."""
END_SECONDS = 5.0
SETTLE_SECONDS = 3.0
"""Longest wait for processes of a run that has just ended: they are ending too."""
AGENTS = ("/ray/dashboard/agent.py", "/ray/_private/runtime_env/agent/main.py")
AGENT_SECONDS = 90.0
"""Age up to which an agent of Ray ends by itself: a new one looks for its raylet later."""
BY_THE_CLOCK = 1e9
"""Start times above are no seconds since the machine was started."""


@dataclass(frozen=True)
class Leftover:
    """Something that a dead run left, and the function that removes it."""

    what: str
    remove: Callable[[], None]


def find_leftovers(run_folders: list[Path]) -> list[Leftover]:
    """run_folders: folders that hold runs."""
    found = list(_processes())
    found += [Leftover(str(file), partial(file.unlink, missing_ok=True)) for file in dead_semaphores()]
    found += [Leftover(str(folder), partial(shutil.rmtree, folder)) for folder in orphans()]
    found += [Leftover(str(folder), partial(shutil.rmtree, folder)) for folder in left_behind()]
    for folder in run_folders:
        found += _addresses(folder)
    return found


def _processes() -> Iterator[Leftover]:
    """Processes of a local Ray whose driver is dead: they carry its process id and start time. Those that are
    ending by themselves are no leftovers."""
    orphans = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it has ended, or belongs to another user
            owner = process.environ().get(OWNER_VARIABLE)
            if owner and not is_running(owner) and is_alive(process) and not _ends_by_itself(process):
                orphans.append(process)
    for process in psutil.wait_procs(orphans, timeout=SETTLE_SECONDS)[1] if orphans else ():
        with suppress(psutil.Error):
            name = " ".join(process.cmdline()).strip()[:60] or process.name()
            yield Leftover(f"process {process.pid}, {name}", partial(_end, process))


def _ends_by_itself(process: psutil.Process) -> bool:
    """Whether it is an agent of Ray that has not looked for its raylet yet."""
    is_agent = any(part.endswith(AGENTS) for part in process.cmdline())
    return is_agent and started(psutil.Process()) - started(process) < AGENT_SECONDS


def is_running(owner: str) -> bool:
    """Whether the process of `services.local_ray.owner_mark` is there, and not another of its id."""
    pid, _, since = owner.partition(":")
    try:
        process = psutil.Process(int(pid))
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return float(since) > BY_THE_CLOCK or abs(started(process) - float(since)) < 0.1
    except psutil.NoSuchProcess:
        return False
    except (ValueError, psutil.Error):
        return True  # what cannot be judged is left alone


def _end(process: psutil.Process) -> None:
    """psutil makes sure that it is still the same process."""
    try:
        process.terminate()
        process.wait(END_SECONDS)
    except psutil.TimeoutExpired:
        process.kill()
        process.wait(END_SECONDS)
    except psutil.NoSuchProcess:
        return


def _addresses(folder: Path) -> Iterator[Leftover]:
    """control.json of runs that are dead: their process is gone from this host, and nobody holds the run's
    lock."""
    for file in sorted(folder.glob("*/control.json")):
        about = hints(file)
        pid = about.get("pid")
        if not isinstance(pid, int):
            continue  # no run wrote it
        host = about.get("host", socket.gethostname())
        if host == socket.gethostname() and not psutil.pid_exists(pid) and not _locked(file.parent):
            yield Leftover(
                f"{file}, which names {about.get('url')} of a dead run", partial(file.unlink, missing_ok=True)
            )


def _locked(run: Path) -> bool:
    file = run / LOCK
    if not file.exists():
        return False
    try:
        lock(file).close()
    except OSError:
        return True
    return False
