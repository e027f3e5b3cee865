"""The common part of the grids of runs (`benchmarks.collapse`, `benchmarks.barometer`): a cell's files, the
compressed form of its results, and the command line."""

from __future__ import annotations

import argparse
import gzip
import io
import json
import platform
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console

from services.common.errors import UnspiralError
from services.common.files import json_lines, write_json
from services.common.signals import Stopped

DIGITS = 6
"""Significant digits that are kept."""


class CellFolder(ABC):
    """Where one cell's files lie in the grid's folder, and what they say of it."""

    seed: int
    folder: Path
    """Of the whole grid."""

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

    def step(self) -> int:
        """The last whole step."""
        return max(
            (row["step"] for row in json_lines(self.run / "metrics.jsonl") if "step" in row), default=0
        )

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
