"""A process that does not outlive the one that it belongs to."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

import psutil

from services.common.processes.alive import is_alive

OWNER_VARIABLE = "UNSPIRAL_ENGINE_OWNER"
"""Process id of the rollout worker that an engine belongs to."""
_PR_SET_PDEATHSIG = 1


def end_with(owner: int) -> None:
    """End this process when `owner` ends, so that a killed worker leaves no engine behind, nor the GPU memory
    of one that hangs."""
    if sys.platform == "linux":
        # The kernel also ends a process that is stopped, or whose threads stand still. (It counts from the
        # parent's thread that started this process: one that lives as long as the engine's owner does.)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        process = psutil.Process(owner)
    except psutil.NoSuchProcess:  # it ended while this process started
        os._exit(1)

    def watch() -> None:
        while is_alive(process):
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name="owner-watch", daemon=True).start()
