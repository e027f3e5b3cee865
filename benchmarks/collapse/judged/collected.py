"""The committed form of a cell: `ARM/SEED.jsonl.gz`, the columns that the outcomes need, and a fingerprint.

Lines: a header (`arm seed steps died attempts seconds fingerprint warm_start versions`), the evaluations
(`evaluation step em n`), then the steps.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.collapse.judged.outcomes import COLUMNS, END, Outcomes, outcomes
from benchmarks.collapse.planned.arms import kept_series
from benchmarks.collapse.planned.cells import Cell
from benchmarks.collapse.running.grid import PACKAGES, machine_file, warm_file
from benchmarks.grids.kept import compressed, short, versions
from services.common.files import json_lines, write_atomically

RESULTS = Path(__file__).parents[2] / "results" / "collapse"
FIRST_BATCH = ("reward/mean", "rollout/length", "rollout/searches")


@dataclass(frozen=True)
class Result:
    """A collected cell."""

    header: dict[str, Any]
    rows: list[dict[str, Any]]
    sampled: dict[int, float]
    greedy: dict[int, float]

    def outcomes(self) -> Outcomes:
        return self._outcomes

    @cached_property
    def _outcomes(self) -> Outcomes:
        return outcomes(self.rows, self.sampled, self.greedy, died=self.header["died"], end=END)

    def first_batch(self) -> tuple[Any, ...] | None:
        """What the first batch was like, before any update: equal for all arms of a seed."""
        first = next((row for row in self.rows if row["step"] == 1), None)
        return tuple(first.get(key) for key in FIRST_BATCH) if first else None


Results = Mapping[str, Mapping[int, Result]]
"""By arm and seed."""


def reproducible(row: dict[str, Any]) -> dict[str, Any]:
    """A step's metrics without those that may differ between two equal runs: times, rates, the attempt."""
    return {
        key: value
        for key, value in row.items()
        if not key.startswith("time/") and key not in ("rollout/tokens_per_s", "attempt")
    }


def evaluations(events: Iterable[dict[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
    """By mode and step; of one that a resumed run repeated, the last."""
    return {
        (event["mode"], event["step"]): {"em": event["overall"]["em"], "n": event["overall"]["n"]}
        for event in events
        if event.get("event") == "evaluation"
    }


def fingerprint(rows: list[dict[str, Any]], scores: dict[tuple[str, int], dict[str, Any]]) -> str:
    """Checksum of every reproducible bit of a run."""
    scored = sorted((*key, value["em"]) for key, value in scores.items())
    text = json.dumps([[reproducible(row) for row in rows], scored], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def collect(cell: Cell, out: Path, *, replace: bool = False, processor: str = "") -> str:
    """Write the committed form of a cell that ended or died. Returns what was done, in a word or two:
    `written`, `same bits`, `other bits` (kept as it was, unless `replace`), or `not ended`.

    processor: that of the machine that ran the cell, where the grid has not noted it."""
    if not (cell.ended or cell.died):
        return "not ended"
    rows = json_lines(cell.run / "metrics.jsonl")
    scores = evaluations(json_lines(cell.run / "events.jsonl"))
    warm_start = ""
    with suppress(OSError, ValueError):
        warm_start = json.loads(warm_file(cell.folder, cell.seed).read_text(encoding="utf-8"))["sha256"]
    header = {
        "arm": cell.row,
        "seed": cell.seed,
        "steps": max((row["step"] for row in rows), default=0),
        "died": not cell.ended,
        "attempts": 1 + max((row.get("attempt", 0) for row in rows), default=0),
        "seconds": cell.summary().get("seconds"),
        "fingerprint": fingerprint(rows, scores),
        "warm_start": warm_start,
        "versions": machine_of(cell, processor),
    }
    file = out / cell.row / f"{cell.seed}.jsonl.gz"
    if file.exists() and not replace:
        same = read(file).header["fingerprint"] == header["fingerprint"]
        return "same bits" if same else "other bits"
    lines = [header]
    lines += [{"evaluation": mode, "step": step} | score for (mode, step), score in sorted(scores.items())]
    lines += [
        {"step": row["step"]} | {key: short(row.get(key)) for key in COLUMNS if key in row} for row in rows
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, compressed("".join(json.dumps(line) + "\n" for line in lines)))
    return "written"


def machine_of(cell: Cell, processor: str = "") -> dict[str, str]:
    """What the grid noted of the machine that ran the cell. Without a note: this machine's versions, and the
    processor that is given, if any."""
    with suppress(OSError, ValueError):
        noted: dict[str, str] = json.loads(machine_file(cell).read_text(encoding="utf-8"))
        return noted
    return versions(PACKAGES) | ({"processor": processor} if processor else {})


def read(file: Path) -> Result:
    with gzip.open(file, "rt", encoding="utf-8") as text:
        header, *lines = [json.loads(line) for line in text]
    scores: dict[str, dict[int, float]] = {"sampled": {}, "greedy": {}}
    for line in lines:
        if "evaluation" in line:
            scores[line["evaluation"]][line["step"]] = line["em"]
    rows = [line for line in lines if "evaluation" not in line]
    return Result(header, rows, scores["sampled"], scores["greedy"])


def keep_series(results: Results, arm: str, folder: Path) -> int:
    """Write the metrics of an arm's collected cells for the arms that follow it. Returns the number of
    cells."""
    found = results.get(arm, {})
    for seed, cell in found.items():
        file = kept_series(folder, arm, seed)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, "".join(json.dumps(row) + "\n" for row in cell.rows))
    return len(found)


def repeats_of(results: Path) -> Path:
    """The folder of cells that were run a second time, beside that of the results."""
    return results.with_name(f"{results.name}_repeats")


def read_all(folder: Path = RESULTS) -> dict[str, dict[int, Result]]:
    """Results by arm and seed."""
    found: dict[str, dict[int, Result]] = {}
    for file in sorted(folder.glob("*/*.jsonl.gz")):
        found.setdefault(file.parent.name, {})[int(file.name.split(".")[0])] = read(file)
    return found
