"""What trackers export, as rows of metrics: Weights & Biases' CSV, TensorBoard's event files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from services.common.errors import UserError
from services.common.loading.extras import needed_for

EVENTS = "tfevents"
"""In the name of each of TensorBoard's event files."""
OF_RUN = " - "
"""Between a run's name and a metric's, in a column of a chart that Weights & Biases exports."""
BOUNDS = ("__MIN", "__MAX")
"""Ends of the columns with a band's bounds."""
TENSORBOARD_CSV = {"Wall time", "Step", "Value"}


def plain_columns(path: Path, columns: Sequence[str]) -> dict[str, str]:
    """Name of the metric in each column of a CSV file that holds one. Raises UserError for charts of several
    runs, and for TensorBoard's CSV, which does not say whose values it holds."""
    if set(columns) == TENSORBOARD_CSV:
        raise UserError(
            f"{path}: a CSV of TensorBoard holds one metric and not its name; give the run's folder of event "
            "files"
        )
    kept = [name for name in columns if name and not name.endswith(BOUNDS)]
    named = {name: name.split(OF_RUN, 1) for name in kept if OF_RUN in name}
    runs = sorted({run for run, _ in named.values()})
    if len(runs) > 1:
        raise UserError(f"{path}: columns of {len(runs)} runs ({', '.join(runs[:3])}); export one run")
    return {name: named[name][1] if name in named else name for name in kept}


def event_files(path: Path) -> list[Path]:
    """TensorBoard's event files: the file itself, or those of a folder, oldest first."""
    if path.is_dir():
        return sorted((file for file in path.iterdir() if EVENTS in file.name), key=_age)
    return [path] if EVENTS in path.name else []


def _age(file: Path) -> list[tuple[str, int]]:
    """Order of event files by name: second, host, process, a process's count of its files (`.9`, `.10`)."""
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", file.name)]


def rows_of_events(files: Iterable[Path]) -> list[tuple[int, dict[str, Any]]]:
    """(number, metrics) of each value in event files, with `step`. Scalars alone count. A torn end, of a run
    that still writes, is left out. Raises EnvironmentLacks without TensorBoard."""
    with needed_for("TensorBoard's event files", "tensorboard"):
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from tensorboard.util.tensor_util import make_ndarray
    rows: list[tuple[int, dict[str, Any]]] = []
    for file in files:
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                array = make_ndarray(value.tensor)
                if array.size == 1 and array.dtype.kind in "fiu":
                    rows.append((len(rows) + 1, {"step": event.step, value.tag: float(array.item())}))
    return rows
