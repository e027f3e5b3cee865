"""A file system of its own that is full, for what a run does there."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

FILLER = "filler"


@contextlib.contextmanager
def small_disk(folder: Path, kib: int = 512) -> Iterator[Path]:
    """A folder with room for so much. Skips the test where nothing can be mounted."""
    folder.mkdir()
    options = f"size={kib}k,nr_inodes=4096"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        while os.path.ismount(folder):
            subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path) -> None:
    """Take all the room that is left."""
    handle = os.open(disk / FILLER, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        with contextlib.suppress(OSError):
            while True:
                os.write(handle, b"x" * 4096)
    finally:
        os.close(handle)


def read_only(disk: Path) -> None:
    """Have the file system take no more changes by its path, as after an error of the disk. (Files that are
    open stay so.)"""
    subprocess.run(["mount", "--bind", str(disk), str(disk)], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", str(disk)], check=True)
