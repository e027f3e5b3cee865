"""CollapseBench: run its cells (a cause and a cure with a seed), collect them, write its page. Its plan is
PLAN.md, beside this."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rich.console import Console

from benchmarks.collapse_bench.causes import CAUSES
from benchmarks.collapse_bench.cells import Cell, cells, run_grid, set_threads
from benchmarks.collapse_bench.collected import RESULTS, collect, read_all
from benchmarks.collapse_bench.plan import (
    CURES,
    FIRST_SEEDS,
    SEEDS,
    STEPS,
    chosen_causes,
    chosen_cures,
    configuration,
)
from benchmarks.collapse_bench.tables import block, write_page
from benchmarks.grids.cell_folder import run_timed, tell_states
from benchmarks.grids.command_line import (
    add_cell,
    add_commands,
    add_parallel,
    add_tables,
    check_kept,
    command,
    tell_collected,
)
from services.common.loading.lazy import LazyModule
from trainer.config.schema import parse_config

one_process = LazyModule("benchmarks.barometer.one_process")
demo = LazyModule("trainer.lab.demo")
FOLDER = Path("runs/collapse_bench")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m benchmarks.collapse_bench", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    for name, one in add_commands(commands, FOLDER, RESULTS, planned=FIRST_SEEDS, steps=STEPS):
        one.add_argument("--causes", nargs="+", default=["all"], help="causes, or all, dose, second, curve")
        one.add_argument("--cures", nargs="+", default=["all"], help=f"all, curve, {', '.join(CURES)}")
        if name == "grid":
            add_parallel(one)
    add_tables(commands, RESULTS)
    one = add_cell(commands, FOLDER, STEPS)
    one.add_argument("--cause", required=True, choices=CAUSES)
    one.add_argument("--cure", required=True, choices=CURES)
    one = commands.add_parser("warm", help="make one warm start (the grid does this itself)")
    one.add_argument("--seed", type=int, required=True)
    return top


def run_cell(cell: Cell) -> int:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    config = parse_config(configuration(cell.cause, cell.cure, cell.seed, cell.folder, cell.steps))
    fault = CAUSES[cell.cause].made(cell.seed)
    return run_timed(cell, lambda: one_process.train(config, fault))


def run(arguments: argparse.Namespace, console: Console) -> int:
    if arguments.command == "tables":
        results = read_all(arguments.results)
        if arguments.page:
            write_page(results, arguments.page)
        else:
            print(block(results))
        return 0
    if arguments.command == "warm":
        print(demo.lab_model(arguments.seed))
        return 0
    if arguments.command == "cell":
        return run_cell(
            Cell.of(arguments.cause, arguments.cure, arguments.seed, arguments.folder, arguments.steps)
        )
    if arguments.command == "collect":
        check_kept(arguments.seeds, SEEDS, arguments.out, RESULTS)
    causes, cures = chosen_causes(arguments.causes), chosen_cures(arguments.cures)
    found = cells(arguments.folder, causes, cures, arguments.seeds, arguments.steps)
    if arguments.command == "grid":
        set_threads()
        return run_grid(found, arguments.folder, arguments.parallel, console)
    if arguments.command == "status":
        tell_states(found, "cause+cure", console)
        return 0
    words = {cell.name: collect(cell, arguments.out, replace=arguments.replace) for cell in found}
    return tell_collected(words, console)


def main(argv: list[str] | None = None) -> int:
    return command("benchmarks.collapse_bench", parser().parse_args(argv), run)


if __name__ == "__main__":
    sys.exit(main())
