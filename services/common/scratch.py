"""Folders that end with the process that made them, gigabytes of weights among them: scratch folders, and
what is written aside. Each is locked by its process, so that one that a killed process has left is told from
one that is in use.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "unspiral-"
_NAME = re.compile(rf"{_PREFIX}(agent|eval)-(\d+)-\w+")
"""Purpose and process of a scratch folder, and what makes it unique."""


@contextmanager
def scratch_folder(purpose: str) -> Iterator[Path]:
    """A new folder, removed on leaving; those that killed processes have left go first."""
    for left in left_behind():
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{purpose}-{os.getpid()}-") as name:
        with held(Path(name)):
            yield Path(name)


def left_behind() -> list[Path]:
    """Scratch folders of this user whose process has ended."""
    place = Path(tempfile.gettempdir())
    found = [(m, place / m[0]) for name in sorted(os.listdir(place)) if (m := _NAME.fullmatch(name))]
    return [folder for match, folder in found if _abandoned(folder, int(match[2]))]


def remove_abandoned(parent: Path, before: str, after: str = "") -> None:
    """Remove the folders named BEFORE, a process's id, AFTER, whose process has ended."""
    pattern = re.compile(re.escape(before) + r"(\d+)" + re.escape(after))
    for name in os.listdir(parent) if parent.is_dir() else ():
        if (match := pattern.fullmatch(name)) and _abandoned(parent / name, int(match[1])):
            shutil.rmtree(parent / name, ignore_errors=True)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """While inside, nobody takes the folder for one that was left, also where it is renamed."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # not every file system locks folders; there none is taken for abandoned
            fcntl.flock(handle, fcntl.LOCK_SH)
        yield
    finally:
        os.close(handle)


def _is_there(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


def _abandoned(folder: Path, process: int) -> bool:
    """By both: in another container a process has another id, and before its lock a folder has none."""
    try:
        if _is_there(process) or folder.stat().st_uid != os.getuid():
            return False
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
