"""The cells as run folders, and running those that have not ended, a few at a time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.barometer.plan import warm_start_of
from benchmarks.collapse.running.grid import Job, end_all
from benchmarks.collapse_bench.plan import STEPS
from benchmarks.grids.cell_folder import MOST_FAILURES, CellFolder, grid_lock
from services.common.errors import UnspiralError
from services.common.processes import signals

CELL_SECONDS = 2 * 3600.0
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Cell(CellFolder):
    """One cause and one cure (its row is `CAUSE+CURE`) with one seed."""

    steps: int = STEPS

    @classmethod
    def of(cls, cause: str, cure: str, seed: int, folder: Path, steps: int = STEPS) -> Cell:
        return cls(f"{cause}+{cure}", seed, folder, steps)

    @property
    def cause(self) -> str:
        return self.row.partition("+")[0]

    @property
    def cure(self) -> str:
        return self.row.partition("+")[2]


def cells(
    folder: Path, causes: list[str], cures: list[str], seeds: list[int], steps: int = STEPS
) -> list[Cell]:
    """The whole grid of a seed before the next seed: a grid that is cut short holds as many of each cell."""
    return [Cell.of(cause, cure, seed, folder, steps) for seed in seeds for cause in causes for cure in cures]


def command_of(cell: Cell) -> list[str]:
    return [
        sys.executable, "-m", "benchmarks.collapse_bench", "cell", "--folder", str(cell.folder),
        "--cause", cell.cause, "--cure", cell.cure, "--seed", str(cell.seed), "--steps", str(cell.steps),
    ]  # fmt: skip


def warm_command(seed: int) -> list[str]:
    return [sys.executable, "-m", "benchmarks.collapse_bench", "warm", "--seed", str(seed)]


@dataclass
class Running:
    cell: Cell
    job: Job
    deadline: float


def run_grid(found: list[Cell], folder: Path, parallel: int, console: Console) -> int:
    """Run all cells that have not ended; one that was cut begins anew. Returns the exit status: 1 where a
    cell failed. Raises UserError where another grid has the folder, UnspiralError where a warm start fails,
    Stopped after a signal."""
    with grid_lock(folder), signals.raised():
        todo = [cell for cell in found if not cell.ended and cell.failures() < MOST_FAILURES]
        console.print(
            f"{len(found)} cells, {len(todo)} to run, {parallel} at a time; logs in {folder / 'logs'}",
            markup=False,
        )
        for start in dict.fromkeys(warm_start_of(cell.seed) for cell in todo):
            _warm(start, folder)
        return _run(todo, parallel, console)


def _warm(seed: int, folder: Path) -> None:
    job = Job(f"warm start {seed}", warm_command(seed), folder / "logs" / f"warm-{seed}.log")
    try:
        job.start()
        if job.process is not None and (status := job.process.wait(CELL_SECONDS)):
            raise UnspiralError(f"{job.name}: exit status {status}: {job.last_line()} (log: {job.log})")
    finally:
        end_all([job], seconds=30)


def _run(todo: list[Cell], parallel: int, console: Console) -> int:
    waiting = deque(todo)
    running: list[Running] = []
    done = failed = 0
    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                cell = waiting.popleft()
                cell.log.unlink(missing_ok=True)
                job = Job(cell.name, command_of(cell), cell.log)
                running.append(Running(cell, job, time.monotonic() + CELL_SECONDS))
                job.start()
            for one in list(running):
                if not _over(one):
                    continue
                running.remove(one)
                done += 1
                failed += not one.cell.ended
                console.print(f"{_said(one)}; {done} of {len(todo)}", markup=False)
            time.sleep(POLL_SECONDS)
    finally:
        end_all([one.job for one in running], seconds=30)
    return int(failed > 0)


def _over(one: Running) -> bool:
    """Whether its process has ended; one that takes too long is ended."""
    process: subprocess.Popen[bytes] | None = one.job.process
    if process is None or process.poll() is not None:
        return True
    if time.monotonic() < one.deadline:
        return False
    end_all([one.job], seconds=30)
    return True


def _said(one: Running) -> str:
    if one.cell.ended:
        return f"{one.cell.name}: {one.cell.summary()['seconds']:.0f} s"
    status = one.job.process.returncode if one.job.process else -1
    count = one.cell.failed(status)
    return (
        f"{one.cell.name}: exit status {status}, failure {count}: {one.job.last_line()} (log: {one.job.log})"
    )


def set_threads() -> None:
    """One thread per cell: cells run beside each other."""
    os.environ["OMP_NUM_THREADS"] = "1"
