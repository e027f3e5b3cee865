"""Printing never blocks a run. A terminal that stands still (Ctrl-S, a full pipe that nobody reads) or has
gone would otherwise stop the driver in the middle of a step, deaf to signals."""

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
from typing import IO, TYPE_CHECKING

from services.common.printing.commands import typed

if TYPE_CHECKING:
    from rich.console import Console

KEPT = 10_000
"""Largest number of pieces of text that wait to be printed. Further ones are left out, and counted."""
DRAIN_SECONDS = 5.0
"""Longest wait, at the end of a run, for its output to be printed."""


class NonBlockingStream(io.TextIOBase):
    """A text stream whose `write` never waits: a thread of its own passes the text on.

    `logging.handlers.QueueListener` keeps the same promise for log records alone; this is for rich's console,
    whose progress bars and tables write to a stream.
    """

    def __init__(self, file: IO[str], kept: int = KEPT) -> None:
        self._file = file
        self._waiting: queue.Queue[str | None] = queue.Queue(kept)
        self._left_out = 0
        try:
            self._descriptor: int | None = file.fileno()
        except (OSError, ValueError):  # a buffer in memory
            self._descriptor = None
        threading.Thread(target=self._print, name="output", daemon=True).start()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # TextIOBase itself has it as a read-only property
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
        """Wait until all is printed, for so many seconds at most. Returns whether it is."""
        with self._waiting.all_tasks_done:
            return self._waiting.all_tasks_done.wait_for(lambda: not self._waiting.unfinished_tasks, seconds)

    def end(self, seconds: float) -> None:
        """Print the text that waits, for so many seconds at most, and end the thread."""
        if self.drain(seconds):
            self._waiting.put(None)

    def _print(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            # Here, not in the caller's thread: another thread may block in a write to the file.
            self._file.flush()
        while (text := self._waiting.get()) is not None:
            left_out = self._left_out
            self._left_out = 0
            if left_out:
                text = f"({left_out} lines were left out: nobody read them)\n{text}"
            try:
                # The reader may have gone: the run goes on, and its files tell the same.
                with contextlib.suppress(OSError, ValueError):
                    self._pass_on(text)
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


_current: list[NonBlockingStream] = []


@contextmanager
def non_blocking(console: Console) -> Iterator[None]:
    """Inside, printing to the console never waits. On leaving, DRAIN_SECONDS at most."""
    if isinstance(console.file, NonBlockingStream):
        yield
        return
    before = console.file
    stream = NonBlockingStream(before)
    console.file = stream  # type: ignore[assignment]  # TextIOBase is no IO[str]; rich needs `write` alone
    _current.append(stream)
    try:
        yield
    finally:
        console.file = before
        _current.remove(stream)
        stream.end(DRAIN_SECONDS)


def drain(seconds: float = 2.0) -> None:
    """Print the text that waits, before a process exits without a clean end."""
    for stream in _current:
        stream.drain(seconds)


def last_words(text: str, file: IO[str] | None = None) -> None:
    """Print a last line, on stdout by default. Waits no longer than DRAIN_SECONDS."""
    stream = NonBlockingStream(file or sys.stdout)
    stream.write(f"{text}\n")
    stream.end(DRAIN_SECONDS)


def complain(text: str) -> None:
    """Print a last line on stderr, with its commands as they can be typed here."""
    last_words(typed(text), sys.stderr)
