"""The cells of the grid as run folders, and running those that have not ended."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.barometer.plan import STEPS
from benchmarks.grids.cell_folder import MOST_FAILURES, CellFolder, grid_lock
from services.common.errors import EnvironmentLacks
from services.common.processes import signals

CELL_SECONDS = 2 * 3600.0
"""Longest time of a cell, whose process computes for about a minute and a half."""
LOCK_SECONDS = 24 * 3600
"""Longest wait for other work that holds `--lock`."""


@dataclass(frozen=True)
class Cell(CellFolder):
    """One kind (its row) with one seed."""

    steps: int = STEPS


def cells(folder: Path, kinds: list[str], seeds: list[int], steps: int = STEPS) -> list[Cell]:
    """All kinds of a seed before the next seed: a grid that is cut short holds as many of each kind."""
    return [Cell(kind, seed, folder, steps) for seed in seeds for kind in kinds]


def command_of(cell: Cell) -> list[str]:
    return [
        sys.executable, "-m", "benchmarks.barometer", "cell", "--folder", str(cell.folder),
        "--kind", cell.row, "--seed", str(cell.seed), "--steps", str(cell.steps),
    ]  # fmt: skip


def taking_turns(command: list[str], file: Path) -> list[str]:
    """The command under a file's lock, so that cells and other heavy work take turns. Raises EnvironmentLacks
    without `flock`."""
    if shutil.which("flock") is None:
        raise EnvironmentLacks("--lock: needs the program flock (util-linux)")
    return ["flock", "--no-fork", "--timeout", str(LOCK_SECONDS), str(file), *command]


def run_grid(found: list[Cell], folder: Path, console: Console, turns: Path | None = None) -> int:
    """Run all cells that have not ended, one after the other; a cell that was cut begins anew. Returns the
    exit status: 1 where a cell failed.

    turns: a file whose lock each cell holds while it runs. Raises UserError where another grid has the
    folder."""
    bad = 0
    with grid_lock(folder), signals.raised():  # a signal ends the cell's process too
        todo = [cell for cell in found if not cell.ended and cell.failures() < MOST_FAILURES]
        console.print(f"{len(found)} cells, {len(todo)} to run; logs in {folder / 'logs'}", markup=False)
        for place, cell in enumerate(todo, 1):
            command = taking_turns(command_of(cell), turns) if turns else command_of(cell)
            status = _run(cell, command, CELL_SECONDS + (LOCK_SECONDS if turns else 0))
            if cell.ended:
                seconds = cell.summary()["seconds"]
                console.print(f"{cell.name}: {seconds:.0f} s; {place} of {len(todo)}", markup=False)
                continue
            bad += 1
            count = cell.failed(status)
            console.print(
                f"{cell.name}: exit status {status}, failure {count} (log: {cell.log})", markup=False
            )
    return int(bad > 0)


def _run(cell: Cell, command: list[str], seconds: float) -> int:
    """Exit status of a cell's process; -1 where it took too long and was ended."""
    cell.log.parent.mkdir(parents=True, exist_ok=True)
    with open(cell.log, "wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return -1
        finally:
            if process.poll() is None:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(30)
                process.kill()
                process.wait()
