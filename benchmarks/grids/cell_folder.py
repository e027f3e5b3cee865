"""A cell's files in the folder of its grid, and what tells their states."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from services.common.errors import UserError
from services.common.files import hints, lock, write_json
from services.common.runs.paths import last_step

MOST_FAILURES = 2
"""Times that a short cell may fail; then it is left out, and named."""
MOST_WIDTH = 10_000
"""Columns that a table is measured in."""


@dataclass(frozen=True)
class CellFolder:
    """Where one cell's files lie in the grid's folder, and what they say of it."""

    row: str
    """What is run with the seed: the name of a row of the grid."""
    seed: int
    folder: Path
    """Of the whole grid."""
    steps: int

    @property
    def name(self) -> str:
        return f"{self.row}-{self.seed}"

    @property
    def run(self) -> Path:
        return self.folder / self.row / str(self.seed)

    @property
    def log(self) -> Path:
        return self.folder / "logs" / f"{self.name}.log"

    @property
    def _failures(self) -> Path:
        return self.folder / "failures" / f"{self.name}.json"

    def summary(self) -> dict[str, Any]:
        """`summary.json`; empty where the run has not ended once."""
        return hints(self.run / "summary.json")

    @property
    def ended(self) -> bool:
        summary = self.summary()
        return summary.get("exit") == 0 and summary.get("steps") == self.steps

    def step(self) -> int:
        """The last whole step."""
        return last_step(self.run)

    def state(self) -> str:
        """`ended`, `failed`, `at N` or `-`."""
        if self.ended:
            return "ended"
        if self.failures() >= MOST_FAILURES:
            return "failed"
        return f"at {self.step()}" if self.run.exists() else "-"

    def failures(self) -> int:
        return int(hints(self._failures).get("failures", 0))

    def failed(self, status: int) -> int:
        """Count a failure. Returns how many there were."""
        self._failures.parent.mkdir(parents=True, exist_ok=True)
        count = self.failures() + 1
        write_json(self._failures, {"failures": count, "exit": status})
        return count


def grid_lock(folder: Path) -> TextIO:
    """Held by the grid that runs in a folder, which is made. Raises UserError where another one runs in
    it."""
    folder.mkdir(parents=True, exist_ok=True)
    taken = f"--folder {folder}: another grid runs in it; wait for it, or choose another folder"
    return lock(folder / ".lock", lambda holder: UserError(taken))


def run_timed(cell: CellFolder, train: Callable[[], dict[str, Any]]) -> int:
    """Exit status of a cell that is trained in this process; its summary says how long that took."""
    began = time.monotonic()
    summary = train()
    summary["seconds"] = round(time.monotonic() - began, 1)
    summary["cpu_seconds"] = round(time.process_time(), 1)
    write_json(cell.run / "summary.json", summary, indent=1)
    return int(summary["exit"])


def tell_states(found: Sequence[CellFolder], of: str, console: Console) -> None:
    """A row per row of the grid with a column per seed; where that is wider than the console, a line per row
    with the seeds of each state. of: heading of the rows."""
    states: dict[str, dict[int, str]] = {}
    for cell in found:
        states.setdefault(cell.row, {})[cell.seed] = cell.state()
    table = Table(box=None, title="cells", title_justify="left")
    table.add_column(of)
    for seed in dict.fromkeys(cell.seed for cell in found):
        table.add_column(str(seed), justify="right")
    table.add_column("of all")
    for row, mine in states.items():
        ended = list(mine.values()).count("ended")
        table.add_row(row, *mine.values(), f"{ended} of {len(mine)} ended")
    if table.__rich_measure__(console, console.options.update(width=MOST_WIDTH)).maximum <= console.width:
        console.print(table)
        return
    width = max(map(len, [of, *states]))
    console.print(f"{of:{width}}  seeds of each state", markup=False, soft_wrap=True)
    for row, mine in states.items():
        said = "; ".join(
            f"{'not begun' if state == '-' else state}: {_ranges([s for s in mine if mine[s] == state])}"
            for state in dict.fromkeys(mine.values())
        )
        console.print(f"{row:{width}}  {said}", markup=False, soft_wrap=True)


def _ranges(seeds: Sequence[int]) -> str:
    """`1000-1013, 2000` of seeds in their order."""
    runs: list[list[int]] = []
    for seed in seeds:
        if runs and seed == runs[-1][-1] + 1:
            runs[-1].append(seed)
        else:
            runs.append([seed])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
