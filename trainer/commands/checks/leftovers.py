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
from services.common.processes.semaphores import dead_semaphores
from services.weight_sync.shared_memory import orphans

OWNER_VARIABLE = "UNSPIRAL_LOCAL_RAY"
"""As in services.local_ray, which needs Ray."""
END_SECONDS = 5.0


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
    for folder in run_folders:
        found += _addresses(folder)
    return found


def _processes() -> Iterator[Leftover]:
    """Processes of a local Ray whose driver is dead: they carry its process id and start time."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it has ended, or belongs to another user
            owner = process.environ().get(OWNER_VARIABLE)
            if owner and not is_running(owner):
                name = " ".join(process.cmdline()).strip()[:60] or process.name()
                yield Leftover(f"process {process.pid}, {name}", partial(_end, process))


def is_running(owner: str) -> bool:
    """Whether the process of `services.local_ray.owner_mark` is there, and not another of its id."""
    pid, _, started = owner.partition(":")
    try:
        process = psutil.Process(int(pid))
        return abs(process.create_time() - float(started)) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
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
    file = run / ".lock"
    if not file.exists():
        return False
    try:
        lock(file).close()
    except OSError:
        return True
    return False
