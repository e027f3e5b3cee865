"""Whether another process still lives."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

_STARTED = 19
"""Place of the start time in /proc/PID/stat, counted from the field after the name, which may hold blanks."""


def is_alive(process: psutil.Process) -> bool:
    """False for a process that has ended, whether or not its parent has asked for its status."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it may go between the two questions
        return False


def started(process: psutil.Process) -> float:
    """When a process was started, in seconds since the machine was, so that a clock that is set later changes
    nothing; by the clock where there is no /proc. Raises psutil.Error."""
    try:
        stat = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return process.create_time()
    return int(stat.rpartition(")")[2].split()[_STARTED]) / os.sysconf("SC_CLK_TCK")
