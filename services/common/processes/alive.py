"""Whether another process still lives."""

from __future__ import annotations

import psutil


def is_alive(process: psutil.Process) -> bool:
    """False for a process that has ended, whether or not its parent has asked for its status."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it may go between the two questions
        return False
