"""The cells as run folders; their compressed form, `ARM/SEED.json.gz`."""

from __future__ import annotations

import hashlib
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.collapse.running.grid import PACKAGES
from benchmarks.grids.cell_folder import CellFolder
from benchmarks.grids.kept import columns_of, keep, processor, rows_of, unpacked, versions
from benchmarks.one_search.plan import LAST, STEPS
from services.common.files import json_lines

RESULTS = Path(__file__).parents[1] / "results" / "one_search"
COLUMNS = ("reward/mean", "rollout/searches", "llds/beta", "probe/fixed", "entropy")


@dataclass(frozen=True)
class Cell(CellFolder):
    """One arm (its row) with one seed."""

    steps: int = STEPS


@dataclass(frozen=True)
class Result:
    """A collected cell. two_hop: sampled exact match of held-out questions of two hops, by step."""

    header: dict[str, Any]
    two_hop: dict[int, float]
    rows: list[dict[str, Any]]

    @property
    def key(self) -> tuple[str, int]:
        return self.header["arm"], self.header["seed"]

    def searches(self) -> tuple[float, float, float]:
        """Per trajectory: in the first batch, in the mean of the last steps, and in the mean of all (the
        primary outcome: it is larger the sooner a second search comes)."""
        series = [row["rollout/searches"] for row in self.rows]
        return series[0], statistics.fmean(series[-LAST:]), statistics.fmean(series)

    def weight(self) -> float | None:
        """Mean weight of the answer's tokens; None outside LLDS-MA."""
        values = [row["llds/beta"] for row in self.rows if row.get("llds/beta") is not None]
        return statistics.fmean(values) if values else None


def collect(cell: Cell, out: Path, *, replace: bool = False) -> str:
    """Write the committed form. Returns `written`, `same bits`, `other bits` (kept as it was, unless
    `replace`), or `not ended`."""
    if not cell.ended:
        return "not ended"
    rows = json_lines(cell.run / "metrics.jsonl")
    two_hop = {
        event["step"]: event["sources"]["lab_two_hop"]["em"]
        for event in json_lines(cell.run / "events.jsonl")
        if event["event"] == "evaluation" and event["mode"] == "sampled"
    }
    columns = columns_of(rows, COLUMNS)
    text = json.dumps([two_hop, columns], sort_keys=True)
    header = {
        "arm": cell.row,
        "seed": cell.seed,
        "seconds": cell.summary().get("seconds"),
        "cpu_seconds": cell.summary().get("cpu_seconds"),
        "fingerprint": hashlib.sha256(text.encode()).hexdigest(),
        "versions": versions(PACKAGES) | {"processor": processor()},
    }
    content = {
        "header": header,
        "two_hop": two_hop,
        "steps": [row["step"] for row in rows],
        "columns": columns,
    }
    return keep(out / cell.row / f"{cell.seed}.json.gz", content, replace=replace)


def read(file: Path) -> Result:
    kept = unpacked(file)
    return Result(kept["header"], {int(s): em for s, em in kept["two_hop"].items()}, rows_of(kept))


def read_all(folder: Path = RESULTS) -> list[Result]:
    return [read(file) for file in sorted(folder.glob("*/*.json.gz"))]
