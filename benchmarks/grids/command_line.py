"""The command line of a grid: its options, its exit status, and the page that it writes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console

from services.common.errors import UnspiralError, UserError
from services.common.files import write_atomically
from services.common.processes.signals import Stopped


def numbers(text: str) -> list[int]:
    """`100:110` (the end is not included) or `100,103`. Raises ValueError for no number, and for one below
    0."""
    first, colon, end = text.partition(":")
    found = list(range(int(first), int(end))) if colon else [int(part) for part in text.split(",")]
    if not found or min(found) < 0:
        raise ValueError(text)
    return found


def positive(text: str) -> int:
    """Raises ValueError for another number, and for none."""
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def add_commands(
    commands: Any,
    folder: Path,
    results: Path,
    *,
    planned: Sequence[int],
    steps: int,
    named: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """The commands on cells (`grid`, `status`, `collect`) by name, with the options that all grids have.
    planned: seeds of the grid. named: others that `--seeds` takes by a name."""

    def seeds(text: str) -> list[int]:
        return list(named[text]) if text in named else numbers(text)

    says_seeds = ", ".join([*named, "FIRST:END (END not included), or a list"])
    for name, says in (
        ("grid", "run the cells that have not ended"),
        ("status", "print the state of all cells"),
        ("collect", "write the compressed metrics of ended cells"),
    ):
        one = commands.add_parser(name, help=says)
        one.add_argument("--folder", type=Path, default=folder, help="folder of the run folders")
        one.add_argument("--seeds", type=seeds, default=list(planned), help=says_seeds)
        one.add_argument("--steps", type=positive, default=steps, help="training steps of a cell")
        yield name, one
        if name == "collect":
            one.add_argument("--out", type=Path, default=results, help="folder of the compressed metrics")
            one.add_argument("--replace", action="store_true", help="write over files with other bits")


def add_parallel(parser: argparse.ArgumentParser, what: str = "cells") -> None:
    parser.add_argument("--parallel", type=positive, default=2, help=f"{what} at the same time")


def add_tables(commands: Any, results: Path) -> None:
    """The command `tables`."""
    one = commands.add_parser("tables", help="print the tables from the compressed metrics")
    one.add_argument("--results", type=Path, default=results, help="folder of the compressed metrics")
    one.add_argument("--page", type=Path, help="write them into this page, between its two marks")


def add_cell(commands: Any, folder: Path, steps: int) -> argparse.ArgumentParser:
    """The command `cell`, which lacks the options that name the cell's row."""
    one: argparse.ArgumentParser = commands.add_parser(
        "cell", help="run one cell in this process (the grid does this itself)"
    )
    one.add_argument("--folder", type=Path, default=folder)
    one.add_argument("--seed", type=int, required=True)
    one.add_argument("--steps", type=positive, default=steps)
    return one


def check_kept(seeds: Iterable[int], planned: Sequence[int], out: Path, results: Path) -> None:
    """Raises UserError where cells of another seed than the plan's would be collected among its results: any
    seed can be run, and collected elsewhere."""
    others = [seed for seed in seeds if seed not in planned]
    if others and out.resolve() == results.resolve():
        raise UserError(
            f"--seeds {others[0]}: not in the plan, whose seeds are {planned[0]} to {planned[-1]}; "
            "--out FOLDER collects it elsewhere, and tables --results FOLDER shows it"
        )


def write_between(page: Path, first: str, last: str, text: str) -> None:
    """Write a text between the two marks of a page. Raises UserError where it has none."""
    before, begins, rest = page.read_text(encoding="utf-8").partition(first)
    _, ends, after = rest.partition(last)
    if not begins or not ends:
        raise UserError(f"--page {page}: expected the lines {first} and {last}")
    write_atomically(page, f"{before}{first}\n{text}\n{last}{after}")


def tell_collected(words: Mapping[str, str], console: Console) -> int:
    """A line for each cell that ended, by what was done with it. Returns the exit status: 1 where a cell
    repeats a committed one with other bits."""
    for name, word in words.items():
        if word != "not ended":
            console.print(f"{name}: {word}", markup=False)
    return int("other bits" in words.values())


def command(
    program: str,
    arguments: argparse.Namespace,
    run: Callable[[argparse.Namespace, Console], int],
) -> int:
    """The exit status of `run`. A mistake of the user's is one line on stderr and its exit status."""
    try:
        return run(arguments, Console(highlight=False))
    except (UnspiralError, Stopped) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
