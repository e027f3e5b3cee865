"""The committed form of a cell: `CAUSE/CURE/SEED.json.gz`, a header, the held-out scores, and the columns
that the monitor reads."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.barometer.collected import COLUMNS, PACKAGES
from benchmarks.barometer.plan import warm_start_of
from benchmarks.collapse.judged.collected import evaluations
from benchmarks.collapse_bench.cells import Cell
from benchmarks.grids.kept import columns_of, keep, rows_of, unpacked, versions
from services.common.files import json_lines
from services.likelihood.exports.run_files import read_run

RESULTS = Path(__file__).parents[1] / "results" / "collapse_bench"


@dataclass(frozen=True)
class Result:
    """A collected cell. scores: exact match by mode (`greedy`, `sampled`) and step."""

    header: dict[str, Any]
    scores: dict[str, dict[int, float]]
    rows: list[dict[str, Any]]

    @property
    def key(self) -> tuple[str, str, int]:
        return self.header["cause"], self.header["cure"], self.header["seed"]


def collect(cell: Cell, out: Path = RESULTS, *, replace: bool = False) -> str:
    """Write the committed form. Returns `written`, `same bits`, `other bits` (kept as it was, unless
    `replace`), or `not ended`."""
    if not cell.ended:
        return "not ended"
    run = read_run(cell.run)
    run.add_evaluations()
    found = evaluations(json_lines(cell.run / "events.jsonl"))
    scores: dict[str, dict[int, float]] = {}
    for (mode, step), score in sorted(found.items()):
        scores.setdefault(mode, {})[step] = score["em"]
    columns = columns_of(run.metrics, COLUMNS)
    text = json.dumps([scores, columns], sort_keys=True)
    header = {
        "cause": cell.cause,
        "cure": cell.cure,
        "seed": cell.seed,
        "warm_start": warm_start_of(cell.seed),
        "steps": len(run.metrics),
        "seconds": run.summary.get("seconds"),
        "cpu_seconds": run.summary.get("cpu_seconds"),
        "fingerprint": hashlib.sha256(text.encode()).hexdigest(),
        "versions": versions(PACKAGES),
    }
    steps = [row["step"] for row in run.metrics]
    content = {"header": header, "scores": scores, "steps": steps, "columns": columns}
    return keep(out / cell.cause / cell.cure / f"{cell.seed}.json.gz", content, replace=replace)


def read(file: Path) -> Result:
    kept = unpacked(file)
    scores = {mode: {int(step): em for step, em in by.items()} for mode, by in kept["scores"].items()}
    return Result(kept["header"], scores, rows_of(kept))


def read_all(folder: Path = RESULTS) -> list[Result]:
    """Every result, in the order of names and seeds."""
    return [read(file) for file in sorted(folder.glob("*/*/*.json.gz"))]
