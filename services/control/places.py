"""Which run a command is for: a run's folder knows the address of its control plane."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

from services.common.counting import counted
from services.common.errors import EnvironmentLacks, UserError
from services.common.files import hints, holder_of
from services.common.printing.help_pages import RUN, in_a_sentence
from services.common.runs.ends import RUNNING, state_of
from services.common.runs.paths import (
    CONTROL,
    LOCK,
    RUNS,
    SUMMARY,
    is_run,
    last_step,
    no_run_in,
    run_folder,
    runs_below,
    written_at,
)
from services.control.records import RunStatus

ACCEPTED = f"RUN is {in_a_sentence(RUN)}; or an address such as http://127.0.0.1:8200"


@dataclass(frozen=True)
class Place:
    """A run, or an address alone."""

    url: str | None
    """Of its control plane. None: it serves none, or none any more."""
    run: Path | None = None
    """Its folder, where one was named."""
    chosen: str = ""
    """Why it is this run, where none was named."""

    @property
    def answers(self) -> bool:
        """Whether there is something to ask, or will be in a moment."""
        return self.url is not None or self.state == RUNNING

    @property
    def state(self) -> str:
        """Of the run's folder, as `unspiral runs` shows it."""
        assert self.run is not None
        return state_of(self.run, hints(self.run / SUMMARY), last_step(self.run))

    def address(self) -> str:
        """Where to ask. Raises UserError for a run that has ended, EnvironmentLacks for one that starts."""
        if self.url is not None:
            return self.url
        state = self.state
        if state == RUNNING:
            holder = holder_of(self.run / LOCK) if self.run else ""
            raise EnvironmentLacks(
                f"{self.run}: it is running{holder} and names no control plane: it starts or ends (ask again "
                "in some seconds), or has control.enabled=false"
            )
        raise UserError(
            f"{self.run}: {state} {when_ended(last_step(self.run or RUNS))}, so no control plane answers for "
            "it; `unspiral runs` lists the runs that are running"
        )


def when_ended(last: int) -> str:
    """last: the last step that was recorded, 0 for none."""
    return f"after step {last}" if last else "before its first step ended"


def place_of(given: str | None) -> Place:
    """The run or address that was named; with none, the run in runs/ that is running, the newest of several.

    Raises UserError, and FileNotFoundError with the nearest name.
    """
    if given is None:
        return _running_one()
    if "://" in given:
        return Place(given)
    run = run_folder(given)
    if not is_run(run):
        raise UserError(f"{given}: {no_run_in(run)}; {ACCEPTED}")
    return Place(_address(run), run)


def is_of(run: Path, status: RunStatus) -> bool:
    """Whether a control plane's answer is of this run. The address in a killed run's folder may be another
    run's by now: of a process that got its number, or of this host, where the file was written on another."""
    about = hints(run / CONTROL)
    if status.folder is None or status.run is None:
        return True
    if Path(status.folder).exists():
        return Path(status.folder).samefile(run)
    return status.run == about.get("run", status.run)  # a container has other paths


def _running_one(runs: Path = RUNS) -> Place:
    folders = runs_below(runs)
    going = [f for f in folders if _address(f) is not None]
    if not going:
        there = (
            f"none of {counted(len(folders), 'run')} in {runs.absolute()} is running"
            if folders
            else (f"there is no run in {runs.absolute()}")
        )
        raise UserError(f"no RUN is given, and {there}; {ACCEPTED}")
    newest = max(going, key=written_at)
    of = f", the newest of {len(going)} that are running" if len(going) > 1 else ""
    return Place(_address(newest), newest, f"{newest}{of}")


def _address(run: Path) -> str | None:
    """The address in `control.json`; None where there is none, and where its process is gone from this host:
    a killed run leaves the file, and the port may be another's by now."""
    about = hints(run / CONTROL)
    url = about.get("url")
    pid = about.get("pid")
    here = about.get("host") == socket.gethostname()
    if here and isinstance(pid, int) and not psutil.pid_exists(pid):
        return None
    return url if isinstance(url, str) else None
