"""The committed form of a cell: `KIND/SEED.json.gz`, a header and the columns that the monitor reads."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.barometer.cells import Cell
from benchmarks.barometer.plan import split_of, warm_start_of
from benchmarks.grids.kept import columns_of, keep, rows_of, unpacked, versions
from services.likelihood.exports.run_files import read_run
from services.likelihood.monitor.detectors.table import READS

RESULTS = Path(__file__).parents[1] / "results" / "barometer"
PACKAGES = ("torch", "transformers", "deepspeed", "numpy")
COLUMNS = tuple(
    dict.fromkeys(["reward/em", "llds/lambda", *(name for names in READS.values() for name in names)])
)


@dataclass(frozen=True)
class Result:
    """A collected cell."""

    header: dict[str, Any]
    rows: list[dict[str, Any]]
    """One per step, with `step`."""

    @property
    def kind(self) -> str:
        return str(self.header["kind"])

    @property
    def split(self) -> str:
        """By the plan of now: seeds that were spent are looked at."""
        return split_of(self.header["seed"])

    def rewards(self) -> list[float | None]:
        """What the trainer took for the reward, by step; None where there was none."""
        return [row.get("reward/mean") for row in self.rows]


def collect(cell: Cell, out: Path = RESULTS, *, replace: bool = False) -> str:
    """Write the committed form. Returns `written`, `same bits`, `other bits` (kept as it was, unless
    `replace`), or `not ended`."""
    if not cell.ended:
        return "not ended"
    run = read_run(cell.run)
    run.add_evaluations()
    columns = columns_of(run.metrics, COLUMNS)
    text = json.dumps(columns, sort_keys=True)
    header = {
        "kind": cell.row,
        "seed": cell.seed,
        "warm_start": warm_start_of(cell.seed),
        "steps": len(run.metrics),
        "seconds": run.summary.get("seconds"),
        "cpu_seconds": run.summary.get("cpu_seconds"),
        "fingerprint": hashlib.sha256(text.encode()).hexdigest(),
        "versions": versions(PACKAGES),
    }
    content = {"header": header, "steps": [row["step"] for row in run.metrics], "columns": columns}
    return keep(out / cell.row / f"{cell.seed}.json.gz", content, replace=replace)


def read(file: Path) -> Result:
    kept = unpacked(file)
    return Result(kept["header"], rows_of(kept))


def read_all(folder: Path = RESULTS) -> list[Result]:
    """Every result, in the order of kinds' names and seeds."""
    return [read(file) for file in sorted(folder.glob("*/*.json.gz"))]
