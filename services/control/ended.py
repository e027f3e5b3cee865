"""The status of a run that serves no control plane, by what its folder recorded."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from services.common.errors import UserError
from services.common.files import hints, json_lines
from services.common.runs.ends import state_of
from services.common.runs.paths import CONFIG, EVENTS, METRICS, SUMMARY
from services.common.users_files import load_yaml
from services.common.validation import number_of
from services.control.records import RunStatus

REWARDS = 10
"""Mean rewards that are told: as many as a running run tells."""


def recorded(run: Path) -> RunStatus:
    """What the folder of a run says. What nobody recorded, or what only a running run has, is null."""
    summary = hints(run / SUMMARY)
    rows = [row for row in json_lines(run / METRICS) if isinstance(row.get("step"), int)]
    latest = rows[-1] if rows else {}
    last = max((row["step"] for row in rows), default=0)
    lost = sum(event.get("event") == "learner_lost" for event in json_lines(run / EVENTS))
    return RunStatus(
        state="ended",
        run=run.resolve().name,
        folder=str(run.resolve()),
        attempt=_whole(latest.get("attempt")) or 0,
        step=last,
        steps=_planned(run),
        stage=state_of(run, summary, last),
        phase=str(summary.get("phase") or ""),
        version=_whole(latest.get("policy_version")),
        tokens_per_s=None,
        last_sync_seconds=number_of(latest.get("time/sync")),
        rewards=[number_of(row.get("reward/mean")) for row in rows[-REWARDS:]],
        restores=lost,
        seconds=number_of(summary.get("last_part_seconds", summary.get("seconds"))),
    )


def _planned(run: Path) -> int | None:
    with suppress(UserError, KeyError, TypeError):
        return _whole(load_yaml(run / CONFIG)["trainer"]["steps"])
    return None


def _whole(value: Any) -> int | None:
    return value if type(value) is int else None
