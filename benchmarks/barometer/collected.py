"""The committed form of a cell: `KIND/SEED.json.gz`, a header and the columns that the monitor reads."""

from __future__ import annotations

import gzip
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.barometer.cells import Cell
from benchmarks.barometer.plan import split_of, warm_start_of
from benchmarks.cell_grid import compressed, short, versions
from services.common.files import write_atomically
from services.likelihood.exports.run_files import read_run
from services.likelihood.monitor.detectors.table import READS

RESULTS = Path(__file__).parents[1] / "results" / "barometer"
ABSENT = "-"
"""Stands for a metric that a step does not have; null is one that has no finite value."""
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
    columns = {
        name: [short(row[name]) if name in row else ABSENT for row in run.metrics]
        for name in COLUMNS
        if any(name in row for row in run.metrics)
    }
    text = json.dumps(columns, sort_keys=True)
    header = {
        "kind": cell.kind,
        "seed": cell.seed,
        "warm_start": warm_start_of(cell.seed),
        "steps": len(run.metrics),
        "seconds": run.summary.get("seconds"),
        "cpu_seconds": run.summary.get("cpu_seconds"),
        "fingerprint": hashlib.sha256(text.encode()).hexdigest(),
        "versions": versions(PACKAGES),
    }
    file = out / cell.kind / f"{cell.seed}.json.gz"
    if file.exists() and not replace:
        same = read(file).header["fingerprint"] == header["fingerprint"]
        return "same bits" if same else "other bits"
    file.parent.mkdir(parents=True, exist_ok=True)
    steps = [row["step"] for row in run.metrics]
    content = {"header": header, "steps": steps, "columns": columns}
    write_atomically(file, compressed(json.dumps(content, separators=(",", ":"))))
    return "written"


def read(file: Path) -> Result:
    with gzip.open(file, "rt", encoding="utf-8") as text:
        kept = json.load(text)
    rows = [{"step": step} for step in kept["steps"]]
    for name, values in kept["columns"].items():
        for row, value in zip(rows, values, strict=True):
            if value != ABSENT:
                row[name] = value
    return Result(kept["header"], rows)


def read_all(folder: Path = RESULTS) -> list[Result]:
    """Every result, in the order of kinds' names and seeds."""
    return [read(file) for file in sorted(folder.glob("*/*.json.gz"))]
