"""Named semaphores that an engine which was killed leaves in shared memory."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
_NAME = re.compile(r"sem\.loky-(\d+)-\w+")
"""joblib has Python's multiprocessing call them so, with the id of the process that made them."""


def dead_semaphores() -> list[Path]:
    """Those of this user whose maker is gone and which no process that can be seen has open."""
    found = []
    for file in SHARED_MEMORY.glob("sem.loky-*"):
        name = _NAME.fullmatch(file.name)
        if name and not psutil.pid_exists(int(name[1])) and file.lstat().st_uid == os.getuid():
            found.append(file)
    used = _mapped() if found else ""
    return [file for file in found if str(file) not in used]


def remove_dead_semaphores() -> None:
    for file in dead_semaphores():
        file.unlink(missing_ok=True)


def _mapped() -> str:
    """What all processes have mapped of shared memory's semaphores."""
    lines = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # it has ended, or belongs to another user
            lines += [line for line in maps.read_text().splitlines() if "/sem." in line]
    return "\n".join(lines)
