"""Progress of long work: bars on a terminal, and in a log a line from time to time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

Tell = Callable[[str, float, str], None]
"""Told the stage, the share of it that is done (0 to 1), and a note such as `12,000 passages`."""
LOG_SECONDS = 15.0
"""Between two lines in a log."""


@contextmanager
def progress_on(console: Console, log_seconds: float = LOG_SECONDS) -> Iterator[Tell]:
    """Inside, what is told is shown on the console: one bar per stage, which go away at the end. Where the
    console is no terminal, work that takes longer than `log_seconds` prints a line as often."""
    if not console.is_terminal:
        yield _Log(console, log_seconds)
        return
    columns = (
        TextColumn("{task.description:9}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def tell(stage: str, share: float, note: str) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=1.0, note=note)
            bars.update(tasks[stage], completed=share, note=note)

        yield tell


class _Log:
    """Lines of progress. The first comes late, so that short work says nothing; a stage that has said
    something says its end too."""

    def __init__(self, console: Console, seconds: float) -> None:
        self._console = console
        self._seconds = seconds
        self._last = time.monotonic()
        self._open: set[str] = set()
        """Stages that have said something, and not their end."""

    def __call__(self, stage: str, share: float, note: str) -> None:
        now = time.monotonic()
        ended = share >= 1 and stage in self._open
        if now - self._last < self._seconds and not ended:
            return
        (self._open.discard if share >= 1 else self._open.add)(stage)
        self._last = now
        line = f"{stage}: {share:.0%}" + (f", {note}" if note else "")
        self._console.print(line, soft_wrap=True, markup=False, highlight=False)
