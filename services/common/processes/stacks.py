"""What a process is waiting for: its threads' stacks, asked for by a signal, so that one whose threads are
all stuck answers too."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

NAME = "unspiral-stacks"
ANSWER_SECONDS = 2.0
DEPTH = 30
"""Most lines of one task."""


def answer_stack_requests() -> None:
    """From now on SIGUSR1 has this process write its threads' stacks into a file in memory, which
    `thread_stacks` reads. Asked again, it takes the signal back from a handler that was set meanwhile, or a
    parent that had it blocked."""
    file = next((int(handle.name) for handle in _answers(os.getpid())), None)
    faulthandler.unregister(signal.SIGUSR1)
    faulthandler.register(
        signal.SIGUSR1, file=os.memfd_create(NAME) if file is None else file, all_threads=True
    )
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


def _answers(pid: int) -> Iterator[Path]:
    for handle in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(handle).startswith(f"/memfd:{NAME}"):
                yield handle


def thread_stacks(pid: int) -> str:
    """Stacks of all threads of a process on this host, newest call first, or one line that says why there are
    none."""
    try:
        handles = list(_answers(pid))
        state = next(
            line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("State")
        )
    except FileNotFoundError:
        return f"there is no process {pid}"
    except PermissionError:
        return f"process {pid} belongs to another user"
    if not handles:
        return f"process {pid} does not tell its stacks"
    with handles[0].open("rb") as f:
        before = f.seek(0, os.SEEK_END)
        os.kill(pid, signal.SIGUSR1)
        deadline = time.monotonic() + ANSWER_SECONDS
        size = -1
        while time.monotonic() < deadline:
            time.sleep(0.1)
            if (now := f.seek(0, os.SEEK_END)) == size > before:
                break
            size = now
        f.seek(before)
        text = f.read().decode("utf-8", "replace").strip()
    return text or f"process {pid} does not answer ({' '.join(state.split())})"


def task_stacks(tasks: Iterable[asyncio.Task[Any]]) -> str:
    """Where each asyncio task waits, from its outermost coroutine to what that awaits."""
    out = []
    for task in tasks:
        out.append(f"task {task.get_name()}:")
        awaited: Any = task.get_coro()
        for _ in range(DEPTH):
            frame = (
                getattr(awaited, "cr_frame", None)
                or getattr(awaited, "gi_frame", None)
                or getattr(awaited, "ag_frame", None)
            )
            if frame is None:
                break
            out.append(f"  {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}")
            awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
        if (future := getattr(task, "_fut_waiter", None)) is not None:
            out.append(f"  waits for {str(future)[:200]}")
    return "\n".join(out)
