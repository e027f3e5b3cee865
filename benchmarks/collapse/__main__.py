"""The collapse study: run its cells, collect them, print its tables. Its plan is PLAN.md, beside this."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from benchmarks.collapse.judged.collected import RESULTS, collect, keep_series, read_all, repeats_of
from benchmarks.collapse.judged.page import write_page
from benchmarks.collapse.judged.power import paragraph
from benchmarks.collapse.judged.tables import everything
from benchmarks.collapse.planned.arms import ARMS, RUNNABLE, SEEDS, STEPS, chosen, contrasts
from benchmarks.collapse.planned.cells import Cell, cells
from benchmarks.collapse.running.grid import missing_arms, run_grid, warm
from benchmarks.collapse.running.starts import comparison, make_starts
from benchmarks.grids.cell_folder import tell_states
from benchmarks.grids.command_line import (
    add_commands,
    add_parallel,
    add_tables,
    command,
    numbers,
    tell_collected,
)
from services.common.counting import counted

FOLDER = Path("runs/collapse")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m benchmarks.collapse", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    for name, one in add_commands(commands, FOLDER, RESULTS, planned=SEEDS, steps=STEPS):
        one.add_argument(
            "--arms", nargs="+", default=["all"], help="arms, or factorial, variants, all, corners"
        )
        if name == "collect":
            one.add_argument(
                "--processor",
                default="",
                help="of the machine that ran the cells, where the grid has not noted it",
            )
        if name == "grid":
            add_parallel(one)
    add_tables(commands, RESULTS)
    commands.add_parser("power", help="print the paragraph on the power of the design")
    commands.add_parser("needs", help="print the arms that cannot run yet, and what they need")
    one = commands.add_parser("warm", help="make the warm start of one seed (the grid does this itself)")
    one.add_argument("--folder", type=Path, default=FOLDER)
    one.add_argument("--seed", type=int, required=True)
    one = commands.add_parser(
        "series", help="write what an arm's collected cells recorded, for the arms that follow it"
    )
    one.add_argument("--folder", type=Path, default=FOLDER, help="folder of the run folders")
    one.add_argument("--results", type=Path, default=RESULTS, help="folder of the compressed metrics")
    one.add_argument("--arm", choices=sorted({a.follows for a in ARMS.values()} - {""}), default="llds_0.5")
    one = commands.add_parser(
        "starts",
        help="make the warm starts, and compare them with those of the committed cells",
    )
    one.add_argument("--folder", type=Path, default=FOLDER, help="folder of the run folders")
    one.add_argument("--results", type=Path, default=RESULTS, help="folder of the compressed metrics")
    one.add_argument(
        "--seeds", type=numbers, default=list(SEEDS), help="FIRST:END (END not included), or a list"
    )
    add_parallel(one, "warm starts")
    return top


def collect_all(found: list[Cell], arguments: argparse.Namespace, console: Console) -> int:
    """Exit status 1 where a cell repeats a committed one with other bits."""
    out = arguments.out
    options = {"replace": arguments.replace, "processor": arguments.processor}
    words = {cell.name: collect(cell, out, **options) for cell in found}
    status = tell_collected(words, console)
    if status:
        console.print(
            "cells with other bits stay as they are; "
            f"--out {repeats_of(out)} puts these beside them, and the page compares the two",
            markup=False,
            soft_wrap=True,
        )
    console.print(f"{sum(word != 'not ended' for word in words.values())} of {len(words)} cells are there")
    return status


def run(arguments: argparse.Namespace, console: Console) -> int:
    if arguments.command == "tables":
        results = read_all(arguments.results)
        if arguments.page:
            write_page(results, arguments.page, read_all(repeats_of(arguments.results)))
        else:
            print(everything(results))
        return 0
    if arguments.command == "power":
        print(paragraph(len(contrasts(RUNNABLE))))
        return 0
    if arguments.command == "needs":
        print("\n".join(missing_arms()))
        return 0
    if arguments.command == "warm":
        warm(arguments.folder, arguments.seed)
        return 0
    if arguments.command == "series":
        count = keep_series(read_all(arguments.results), arguments.arm, arguments.folder)
        console.print(f"{arguments.arm}: {counted(count, 'cell')}", markup=False)
        return 0 if count else 1
    if arguments.command == "starts":
        made = make_starts(arguments.folder, arguments.seeds, arguments.parallel, console)
        lines, equal = comparison(made, read_all(arguments.results), arguments.results)
        console.print("\n".join(lines), markup=False, soft_wrap=True)
        return 0 if equal else 1
    found = cells(arguments.folder, chosen(arguments.arms), arguments.seeds, arguments.steps)
    if arguments.command == "grid":
        return run_grid(found, arguments.folder, arguments.parallel, console)
    if arguments.command == "status":
        tell_states(found, "arm", console)
        return 0
    return collect_all(found, arguments, console)


def main(argv: list[str] | None = None) -> int:
    return command("benchmarks.collapse", parser().parse_args(argv), run)


if __name__ == "__main__":
    sys.exit(main())
