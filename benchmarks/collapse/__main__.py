"""The collapse study: run its cells, collect them, print its tables. Its plan is PLAN.md, beside this."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from benchmarks.collapse.arms import ARMS, RUNNABLE, SEEDS, STEPS, chosen, contrasts
from benchmarks.collapse.cells import Cell, cells
from benchmarks.collapse.collected import RESULTS, collect, keep_series, read_all, repeats_of
from benchmarks.collapse.grid import missing_arms, run_grid, status_table, warm
from benchmarks.collapse.page import write_page
from benchmarks.collapse.power import paragraph
from benchmarks.collapse.starts import comparison, make_starts
from benchmarks.collapse.tables import everything
from benchmarks.grids.command_line import add_commands, command, numbers, positive, tell_collected
from services.common.counting import counted

FOLDER = Path("runs/collapse")


def seeds(text: str) -> list[int]:
    """`100:110` (the end is not included) or `100,103`."""
    found = numbers(text)
    if min(found) < 0:
        raise ValueError(text)
    return found


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m benchmarks.collapse", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    for name, one in add_commands(commands, FOLDER, RESULTS):
        one.add_argument(
            "--arms", nargs="+", default=["all"], help="arms, or factorial, variants, all, corners"
        )
        one.add_argument(
            "--seeds", type=seeds, default=list(SEEDS), help="FIRST:END (END not included), or a list"
        )
        one.add_argument("--steps", type=positive, default=STEPS, help="training steps of a cell")
        if name == "collect":
            one.add_argument(
                "--processor",
                default="",
                help="of the machine that ran the cells, where the grid has not noted it",
            )
        if name == "grid":
            one.add_argument("--parallel", type=positive, default=2, help="cells at the same time")
    tables = commands.add_parser("tables", help="print tables and verdict from the compressed metrics")
    tables.add_argument("--results", type=Path, default=RESULTS, help="folder of the compressed metrics")
    tables.add_argument(
        "--page", type=Path, help="write the study's part of this page, between its two marks"
    )
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
        "--seeds", type=seeds, default=list(SEEDS), help="FIRST:END (END not included), or a list"
    )
    one.add_argument("--parallel", type=positive, default=2, help="warm starts at the same time")
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
        console.print(status_table(found), width=max(console.width, 160), soft_wrap=False, crop=False)
        return 0
    return collect_all(found, arguments, console)


def main(argv: list[str] | None = None) -> int:
    return command("benchmarks.collapse", parser().parse_args(argv), run)


if __name__ == "__main__":
    sys.exit(main())
