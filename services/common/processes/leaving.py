"""The end of a process in which a user's own code may hang.

Python waits at the end for each thread that is no daemon, and so for pools of `concurrent.futures`. A reward
that hangs in a pool of its own would keep a command that has said its last line, and with it whoever waits
for the exit status.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable

from services.common.counting import counted

END_SECONDS = 10.0
"""For threads to end that are still there at the end of a process."""


def bounded_end(status: int, say: Callable[[str], None]) -> None:
    """For the last act of a process: where threads keep it longer than END_SECONDS, it leaves with this
    status and a line. What is to be done at its end (`atexit`) is not cut short."""
    if _keeping():
        timer = threading.Timer(END_SECONDS, _leave, (status, say))
        timer.daemon = True
        timer.start()


def _keeping() -> list[threading.Thread]:
    """Threads that Python waits for at its end."""
    main = threading.main_thread()
    return [thread for thread in threading.enumerate() if thread is not main and not thread.daemon]


def _leave(status: int, say: Callable[[str], None]) -> None:
    if not (left := _keeping()):  # Python is past the wait for threads
        return
    with contextlib.suppress(Exception):  # of a stderr that is closed: it keeps nobody here
        say(
            f"{counted(len(left), 'thread')} did not end within {END_SECONDS:g} s ({left[0].name}, of a pool "
            "of your own code or of a library): leaving without"
        )
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a closed one may be None
            stream.flush()
    os._exit(status)
