"""`unspiral runs`: the runs of a folder, the newest first."""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from services.common.errors import UserError
from services.common.files import hints, json_lines
from services.common.printing.harmless import harmless
from services.common.runs.ends import state_of
from services.common.runs.paths import (
    CONFIG,
    FILES,
    LATEST,
    METRICS,
    SUMMARY,
    in_runs,
    is_run,
    near_run,
    newest_run,
    runs_below,
    without_ways_up,
)
from services.common.users_files import parse_yaml

SCORES = ("eval/em_greedy", "eval/em_sampled")
AFTER = ("em_after", "em_after_sampled")
HEADS = ("run", "state", "step", "reward", "held-out", "phase", "written")
ABSENT = "-"
UNREADABLE = "not readable"
"""State of a run whose metrics another user keeps to himself."""
_TRAINER = re.compile(r"^trainer:.*\n?(?:[ \t#].*\n?|\n)*", re.MULTILINE)
"""The section of a configuration."""
WHERE = "runs go to run.dir/run.name, by default runs/NAME"


@dataclass(frozen=True)
class Listed:
    """One run of the list. None: not known."""

    run: str
    """Its folder."""
    state: str
    step: int
    """The last step that was recorded; 0 before the first."""
    steps: int | None
    """Steps that are planned."""
    reward: float | None
    score: float | None
    """The newest held-out exact match, greedy where both were asked for."""
    phase: str | None
    written: float
    """When it was written to last, in seconds since 1970."""


def runs_in(folder: Path) -> list[Listed]:
    """All runs of a folder, the newest first; or the one that it is itself, or names as for `run_folder`.
    Raises UserError where there is none."""
    if not folder.exists():
        folder = newest_run() if str(folder) == LATEST else in_runs(folder)
    folder = without_ways_up(folder)
    if folder.is_file():
        raise UserError(
            f"{folder}: is a file; expected a folder of runs, or a run: its folder, name, or latest"
        )
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder{near_run(folder) or f'; {WHERE}'}")
    found = [folder] if is_run(folder) else runs_below(folder)
    if not found:
        raise UserError(f"{folder}: there is no run in {folder.absolute()}; {WHERE}")
    return sorted((_listed(f) for f in found), key=lambda run: (-run.written, run.run))


def _listed(folder: Path) -> Listed:
    files = [folder / name for name in (*FILES, SUMMARY)]
    written = {file.name: file.stat().st_mtime for file in files if file.is_file()}
    try:
        steps = json_lines(folder / METRICS) if METRICS in written else []
    except PermissionError:
        return Listed(str(folder), UNREADABLE, 0, None, None, None, None, max(written.values()))
    step = steps[-1].get("step") if steps else 0
    step = step if isinstance(step, int) else len(steps)
    phase = steps[-1].get("phase") if steps else None
    summary = hints(folder / SUMMARY)
    after = next((summary[k] for k in AFTER if _is_number(summary.get(k))), None)
    return Listed(
        run=str(folder),
        state=state_of(folder, summary, step),
        step=step,
        steps=_planned(folder),
        reward=_newest(steps, "reward/mean"),
        score=after if after is not None else _newest(steps, *SCORES),
        phase=phase if isinstance(phase, str) else None,
        written=max(written.values(), default=0.0),
    )


def _planned(folder: Path) -> int | None:
    try:
        section = _TRAINER.search((folder / CONFIG).read_text(encoding="utf-8"))
        # The whole file takes ten times as long, and there may be thousands.
        planned = parse_yaml(section[0])["trainer"]["steps"] if section else None
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return planned if isinstance(planned, int) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _newest(steps: list[dict[str, Any]], *names: str) -> float | None:
    """The last value of the first of these metrics that has one."""
    for name in names:
        if values := [step[name] for step in steps if _is_number(step.get(name))]:
            return values[-1]
    return None


def table(runs: list[Listed]) -> list[str]:
    """The list as lines whose columns line up."""
    rows = [HEADS, *map(_row, runs)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADS))]
    right = {HEADS.index(name) for name in ("step", "reward", "held-out")}
    return [
        "  ".join(f"{cell:{'>' if i in right else '<'}{widths[i]}}" for i, cell in enumerate(row)).rstrip()
        for row in rows
    ]


def _row(run: Listed) -> tuple[str, ...]:
    numbers = (ABSENT if value is None else f"{value:.3f}" for value in (run.reward, run.score))
    step = str(run.step) if run.steps is None else f"{run.step}/{run.steps}"
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.written))
    return (harmless(run.run), harmless(run.state), step, *numbers, harmless(run.phase or ABSENT), when)


def as_json(runs: list[Listed]) -> str:
    """The list as JSON."""
    return json.dumps([asdict(run) for run in runs], indent=1)
