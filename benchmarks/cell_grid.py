"""The common part of the grids of runs (`benchmarks.collapse`, `benchmarks.collapse_bench`,
`benchmarks.barometer`): a cell's files, the compressed form of its results, and the command line."""

from __future__ import annotations

import argparse
import gzip
import io
import json
import platform
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from services.common.errors import UnspiralError, UserError
from services.common.files import write_atomically, write_json
from services.common.processes.signals import Stopped
from services.common.run_paths import last_step

DIGITS = 6
"""Significant digits that are kept."""
ABSENT = "-"
"""Stands for a metric that a step does not have; null is one that has no finite value."""
MOST_FAILURES = 2
"""Times that a short cell may fail; then it is left out, and named."""


class CellFolder(ABC):
    """Where one cell's files lie in the grid's folder, and what they say of it."""

    seed: int
    folder: Path
    """Of the whole grid."""

    steps: int

    @property
    @abstractmethod
    def row(self) -> str:
        """What is run with the seed: the name of a row of the grid."""

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
        with suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads((self.run / "summary.json").read_text(encoding="utf-8"))
            return found
        return {}

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
        with suppress(OSError, ValueError):
            return int(json.loads(self._failures.read_text(encoding="utf-8"))["failures"])
        return 0

    def failed(self, status: int) -> int:
        """Count a failure. Returns how many there were."""
        self._failures.parent.mkdir(parents=True, exist_ok=True)
        count = self.failures() + 1
        write_json(self._failures, {"failures": count, "exit": status})
        return count


def short(value: Any) -> Any:
    """A number with DIGITS significant digits; anything else as it is."""
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def versions(packages: Iterable[str]) -> dict[str, str]:
    """The kind of machine, and the versions of the packages that are installed."""
    found = {"machine": platform.machine()}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Name, family and model of the processor: what decides how float32 sums are rounded."""
    known: dict[str, str] = {}
    with suppress(OSError):
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            known.setdefault(key.strip(), value.strip())
    if "model name" not in known:
        return platform.processor() or "unknown processor"
    return f"{known['model name']} (family {known.get('cpu family', '?')}, model {known.get('model', '?')})"


def run_timed(cell: CellFolder, train: Callable[[], dict[str, Any]]) -> int:
    """Exit status of a cell that is trained in this process; its summary says how long that took."""
    began = time.monotonic()
    summary = train()
    summary["seconds"] = round(time.monotonic() - began, 1)
    summary["cpu_seconds"] = round(time.process_time(), 1)
    write_json(cell.run / "summary.json", summary, indent=1)
    return int(summary["exit"])


def columns_of(rows: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, list[Any]]:
    """Those of the metrics that a step has, as columns."""
    return {
        name: [short(row[name]) if name in row else ABSENT for row in rows]
        for name in names
        if any(name in row for row in rows)
    }


def rows_of(kept: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The steps of a kept file, each with `step`, from its `steps` and `columns`."""
    rows = [{"step": step} for step in kept["steps"]]
    for name, values in kept["columns"].items():
        for row, value in zip(rows, values, strict=True):
            if value != ABSENT:
                row[name] = value
    return rows


def unpacked(file: Path) -> dict[str, Any]:
    """The content of a kept file."""
    with gzip.open(file, "rt", encoding="utf-8") as text:
        content: dict[str, Any] = json.load(text)
    return content


def keep(file: Path, content: Mapping[str, Any], *, replace: bool) -> str:
    """Write a cell's content, whose `header` has its `fingerprint`. Returns `written`, `same bits` or `other
    bits` (kept as it was, unless `replace`)."""
    if file.exists() and not replace:
        same = unpacked(file)["header"]["fingerprint"] == content["header"]["fingerprint"]
        return "same bits" if same else "other bits"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, compressed(json.dumps(content, separators=(",", ":"))))
    return "written"


def compressed(text: str) -> bytes:
    """The same bytes for the same text: no time and no name inside."""
    data = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=data, mtime=0) as packed:
        packed.write(text.encode())
    return data.getvalue()


def numbers(text: str) -> list[int]:
    """`100:110` (the end is not included) or `100,103`. Raises ValueError for no number."""
    first, colon, end = text.partition(":")
    found = list(range(int(first), int(end))) if colon else [int(part) for part in text.split(",")]
    if not found:
        raise ValueError(text)
    return found


def positive(text: str) -> int:
    """Raises ValueError for another number, and for none."""
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def add_commands(commands: Any, folder: Path, results: Path) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """The commands on cells (`grid`, `status`, `collect`) by name, with the options that all grids have."""
    for name, says in (
        ("grid", "run the cells that have not ended"),
        ("status", "print the state of all cells"),
        ("collect", "write the compressed metrics of ended cells"),
    ):
        one = commands.add_parser(name, help=says)
        one.add_argument("--folder", type=Path, default=folder, help="folder of the run folders")
        yield name, one
        if name == "collect":
            one.add_argument("--out", type=Path, default=results, help="folder of the compressed metrics")
            one.add_argument("--replace", action="store_true", help="write over files with other bits")


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
