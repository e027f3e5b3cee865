"""What a run prints never holds it up: a terminal that stands still (Ctrl-S, a full pipe that nobody reads)
or has gone would otherwise stop the driver in the middle of a step, deaf to signals."""

from __future__ import annotations

import contextlib
import io
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

KEPT = 10_000
"""Pieces of text that may wait to be printed; what comes when so many wait is left out, and counted."""
DRAIN_SECONDS = 5.0
"""Longest wait, when a run ends, for what it has still to print."""


class Unhurried(io.TextIOBase):
    """A text stream whose `write` never waits: a thread of its own passes the text on."""

    def __init__(self, file: TextIO, kept: int = KEPT) -> None:
        self._file, self._waiting, self._left_out = file, queue.Queue(kept), 0
        try:
            self._descriptor: int | None = file.fileno()
        except (OSError, ValueError):  # a buffer in memory
            self._descriptor = None
        threading.Thread(target=self._print, name="output", daemon=True).start()

    @property
    def encoding(self) -> str:
        return getattr(self._file, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        return self._file.isatty()

    def fileno(self) -> int:
        return self._file.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        try:
            self._waiting.put_nowait(text)
        except queue.Full:
            self._left_out += 1
        return len(text)

    def drain(self, seconds: float) -> bool:
        """Wait until all is printed. False: it is not, after so many seconds."""
        with self._waiting.all_tasks_done:
            return self._waiting.all_tasks_done.wait_for(lambda: not self._waiting.unfinished_tasks, seconds)

    def end(self, seconds: float) -> None:
        """Print what waits, for so many seconds, and end the thread."""
        if self.drain(seconds):
            self._waiting.put(None)

    def _print(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._file.flush()  # here, not at the caller's: another thread may stand in the middle of a write to it
        while (text := self._waiting.get()) is not None:
            left_out, self._left_out = self._left_out, 0
            if left_out:
                text = f"({left_out} lines were left out: nobody read them)\n{text}"
            try:
                self._pass_on(text)
            except (OSError, ValueError):
                pass  # whoever read has gone; the run goes on, and its files tell the same
            finally:
                self._waiting.task_done()

    def _pass_on(self, text: str) -> None:
        if self._descriptor is None:
            self._file.write(text)
            return
        # Not through the file object: Python waits for its lock when it exits, and this thread may hold that
        # for ever.
        left = memoryview(text.encode(self.encoding, "replace"))
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:
                time.sleep(0.05)


_current: list[Unhurried] = []


@contextmanager
def unhurried(console: Console) -> Iterator[None]:
    """Inside, nothing that the console prints makes the caller wait; on leaving, DRAIN_SECONDS at most."""
    if isinstance(console.file, Unhurried):  # so it is already
        yield
        return
    before, stream = console.file, Unhurried(console.file)
    console.file = stream
    _current.append(stream)
    try:
        yield
    finally:
        console.file = before
        _current.remove(stream)
        stream.end(DRAIN_SECONDS)


def drain(seconds: float = 2.0) -> None:
    """Before a process is left as it is: what was said last is printed, if anybody reads it."""
    for stream in _current:
        stream.drain(seconds)


def last_words(text: str, file: TextIO | None = None) -> None:
    """A last line, on stdout unless told otherwise. Waits no longer than DRAIN_SECONDS."""
    stream = Unhurried(file or sys.stdout)
    stream.write(f"{text}\n")
    stream.end(DRAIN_SECONDS)


def complain(text: str) -> None:
    """A last line on stderr."""
    last_words(text, sys.stderr)
