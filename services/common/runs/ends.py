"""How a run ended, by its folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.common.files import holder_of
from services.common.runs.paths import CONFIG, LOCK

ENDS = {0: "ended", 4: "stopped by the monitor", 129: "stopped", 130: "stopped", 143: "stopped"}
"""State by exit status; any other is a failure."""
RUNNING = "running"
CUT_OFF = "cut off"
SIGNALS = {129: "SIGHUP", 130: "SIGINT (Ctrl-C)", 143: "SIGTERM"}


def state_of(folder: Path, summary: Mapping[str, Any], last_step: int) -> str:
    """One of `ENDS`, `failed (STATUS)`, `running`, or `cut off`: no end was recorded, or that of an earlier
    attempt. summary: of `summary.json`, empty where there is none. last_step: the last one recorded.

    A run that writes its own report at its end holds its lock still, and has ended.
    """
    holder = holder_of(folder / LOCK)
    if holder and holder != f" (process {os.getpid()})":
        return RUNNING
    if "exit" in summary and not _older(summary, last_step):
        return ENDS.get(summary["exit"], f"failed ({summary['exit']})")
    return RUNNING if holder else CUT_OFF


def is_over(run: Path, summary: Mapping[str, Any], last_step: int) -> bool:
    """Whether nothing more comes to what was recorded. run: a folder, or a file of metrics in one."""
    folder = run if run.is_dir() else run.parent
    return state_of(folder, summary, last_step) != RUNNING


def ending(folder: Path, summary: Mapping[str, Any], last_step: int) -> dict[str, str] | None:
    """`state`, and `text`, a sentence for a report. None where nothing is known: a folder that holds metrics
    alone."""
    if not (folder / CONFIG).is_file() and "exit" not in summary:
        return None
    state = state_of(folder, summary, last_step)
    return {"state": state, "text": _sentence(state, summary)}


def _sentence(state: str, summary: Mapping[str, Any]) -> str:
    if state == RUNNING:
        return "It was still running when this report was written."
    if state == CUT_OFF:
        return "No end was recorded: it was killed, or it still runs on another machine."
    status = summary["exit"]
    if status == 0:
        why = summary.get("stopped")
        return f"It finished early: {why}." if why else "It finished."
    if status == 4:
        return "The monitor stopped it (exit status 4)."
    if status in SIGNALS:
        return f"It was stopped by {SIGNALS[status]} (exit status {status})."
    return f"It ended with an error (exit status {status})."


def _older(summary: Mapping[str, Any], last_step: int) -> bool:
    """Whether steps were recorded after it. By content: a copy or a download has other times."""
    steps = summary.get("steps")
    return isinstance(steps, int) and last_step > steps
