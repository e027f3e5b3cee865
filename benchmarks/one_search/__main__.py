"""GRPO, LLDS-A and LLDS-MA from a policy that searches once. The plan is PLAN.md, beside this."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rich.console import Console

from benchmarks.barometer.faults import Fault
from benchmarks.collapse.running.grid import GridProgress, Job, Runner
from benchmarks.collapse_bench.cells import set_threads
from benchmarks.grids.cell_folder import grid_lock, run_timed, tell_states
from benchmarks.grids.command_line import (
    add_cell,
    add_commands,
    add_parallel,
    add_tables,
    check_kept,
    command,
    tell_collected,
    write_between,
)
from benchmarks.one_search.cells import RESULTS, Cell, collect, read_all
from benchmarks.one_search.plan import ARMS, SEEDS, STEPS, configuration
from benchmarks.one_search.tables import END, FIRST, block
from services.common.loading.lazy import LazyModule
from trainer.config.schema import parse_config

one_process = LazyModule("benchmarks.barometer.one_process")
start = LazyModule("benchmarks.one_search.start")
FOLDER = Path("runs/one_search")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m benchmarks.one_search", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    for name, one in add_commands(commands, FOLDER, RESULTS, planned=SEEDS, steps=STEPS):
        one.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS, help="arms of the plan")
        if name == "grid":
            add_parallel(one)
    add_tables(commands, RESULTS)
    add_cell(commands, FOLDER, STEPS).add_argument("--arm", required=True, choices=ARMS)
    one = commands.add_parser("start", help="make the start of one seed (the grid does this itself)")
    one.add_argument("--seed", type=int, required=True)
    return top


def run_cell(cell: Cell) -> int:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    model = start.stuck_model(cell.seed)
    config = parse_config(configuration(cell.row, cell.seed, model, cell.folder, cell.steps))
    return run_timed(cell, lambda: one_process.train(config, Fault(cell.seed)))


def job(name: str, log: Path, *arguments: str) -> Job:
    return Job(name, [sys.executable, "-m", "benchmarks.one_search", *arguments], log)


def run_grid(found: list[Cell], folder: Path, parallel: int, console: Console) -> int:
    """Run what has not ended; a cell that was cut begins anew. Raises UserError where another grid has the
    folder, UnspiralError where a cell fails."""
    set_threads()
    with grid_lock(folder):
        todo = [cell for cell in found if not cell.ended]
        console.print(
            f"{len(found)} cells, {len(todo)} to run, {parallel} at a time; logs in {folder / 'logs'}"
        )
        seeds = dict.fromkeys(cell.seed for cell in todo)
        starts = [
            job(f"start {s}", folder / "logs" / f"start-{s}.log", "start", "--seed", str(s)) for s in seeds
        ]
        cells = [
            job(
                cell.name,
                cell.log,
                *("cell", "--folder", str(cell.folder), "--arm", cell.row),
                *("--seed", str(cell.seed), "--steps", str(cell.steps)),
            )
            for cell in todo
        ]
        progress = GridProgress([], parallel, console)
        with Runner(parallel, console).opened() as runner:
            runner.run(starts, progress)
            runner.run(cells, progress)
    return 0


def run(arguments: argparse.Namespace, console: Console) -> int:
    if arguments.command == "tables":
        text = block(read_all(arguments.results))
        if arguments.page:
            write_between(arguments.page, FIRST, END, text)
        else:
            print(text)
        return 0
    if arguments.command == "start":
        print(start.stuck_model(arguments.seed))
        return 0
    if arguments.command == "cell":
        return run_cell(Cell(arguments.arm, arguments.seed, arguments.folder, arguments.steps))
    found = [
        Cell(arm, seed, arguments.folder, arguments.steps)
        for seed in arguments.seeds
        for arm in arguments.arms
    ]
    if arguments.command == "grid":
        return run_grid(found, arguments.folder, arguments.parallel, console)
    if arguments.command == "status":
        tell_states(found, "arm", console)
        return 0
    check_kept(arguments.seeds, SEEDS, arguments.out, RESULTS)
    words = {cell.name: collect(cell, arguments.out, replace=arguments.replace) for cell in found}
    return tell_collected(words, console)


def main(argv: list[str] | None = None) -> int:
    return command("benchmarks.one_search", parser().parse_args(argv), run)


if __name__ == "__main__":
    sys.exit(main())
