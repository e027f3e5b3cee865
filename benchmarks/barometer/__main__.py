"""The barometer: run its cells, collect them, print how the monitor does on them. Its plan is PLAN.md, beside
this."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rich.console import Console

from benchmarks.barometer.cells import Cell, cells, run_grid
from benchmarks.barometer.collected import RESULTS, collect, read_all
from benchmarks.barometer.plan import HELD_OUT_SEEDS, KINDS, LOOKED_AT, STEPS, chosen, configuration, split_of
from benchmarks.barometer.tables import everything, write_page
from benchmarks.grids.cell_folder import run_timed, tell_states
from benchmarks.grids.command_line import (
    add_cell,
    add_commands,
    add_tables,
    command,
    tell_collected,
)
from services.common.loading.lazy import LazyModule
from trainer.config.schema import parse_config

one_process = LazyModule("benchmarks.barometer.one_process")
FOLDER = Path("runs/barometer")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m benchmarks.barometer", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    named = {"held_out": HELD_OUT_SEEDS, "looked_at": LOOKED_AT}
    cells_of = add_commands(commands, FOLDER, RESULTS, planned=HELD_OUT_SEEDS, steps=STEPS, named=named)
    for name, one in cells_of:
        one.add_argument("--kinds", nargs="+", default=["all"], help=f"all, or some of {', '.join(KINDS)}")
        if name == "grid":
            one.add_argument("--lock", type=Path, help="a file whose lock each cell holds while it runs")
    add_tables(commands, RESULTS)
    add_cell(commands, FOLDER, STEPS).add_argument("--kind", required=True, choices=KINDS)
    return top


def run_cell(cell: Cell) -> int:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    config = parse_config(configuration(cell.row, cell.seed, cell.folder, cell.steps))
    fault = KINDS[cell.row].fault(cell.seed)
    return run_timed(cell, lambda: one_process.train(config, fault))


def run(arguments: argparse.Namespace, console: Console) -> int:
    if arguments.command == "tables":
        results = read_all(arguments.results)
        if arguments.page:
            write_page(results, arguments.page)
        else:
            print(everything(results))
        return 0
    if arguments.command == "cell":
        split_of(arguments.seed)
        return run_cell(Cell(arguments.kind, arguments.seed, arguments.folder, arguments.steps))
    for seed in arguments.seeds:
        split_of(seed)
    found = cells(arguments.folder, chosen(arguments.kinds), arguments.seeds, arguments.steps)
    if arguments.command == "grid":
        return run_grid(found, arguments.folder, console, arguments.lock)
    if arguments.command == "status":
        tell_states(found, "kind", console)
        return 0
    words = {cell.name: collect(cell, arguments.out, replace=arguments.replace) for cell in found}
    return tell_collected(words, console)


def main(argv: list[str] | None = None) -> int:
    return command("benchmarks.barometer", parser().parse_args(argv), run)


if __name__ == "__main__":
    sys.exit(main())
