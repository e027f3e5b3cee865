"""A cell's files in the folder of its grid, and the table of their states."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.table import Table

from services.common.errors import UserError
from services.common.files import hints, lock, write_json
from services.common.runs.paths import last_step

MOST_FAILURES = 2
"""Times that a short cell may fail; then it is left out, and named."""


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


def states_table(found: Sequence[CellFolder], of: str) -> Table:
    """A row per row of the grid, a column per seed. of: heading of the rows."""
    table = Table(box=None, title="cells", title_justify="left")
    table.add_column(of)
    seeds = list(dict.fromkeys(cell.seed for cell in found))
    for seed in seeds:
        table.add_column(str(seed), justify="right")
    for row in dict.fromkeys(cell.row for cell in found):
        mine = {cell.seed: cell for cell in found if cell.row == row}
        table.add_row(row, *(mine[seed].state() for seed in seeds))
    return table
