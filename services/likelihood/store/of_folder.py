"""A folder of runs as one store: the `likelihood.db` of each run below it, as `unspiral train` leaves them.

A run is called as its folder is, so that a run that was kept aside (`demo-0.before`) and the one that took
its place are two. Runs that come, go or go on are seen at the next look. Posts to a run go to its own file; a
further run has none.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from services.common.errors import EnvironmentLacks, UserError
from services.common.runs.paths import STORE
from services.likelihood.microscope.heads import SampleHead
from services.likelihood.microscope.prompts import MOST_PROMPTS, KeptPrompt
from services.likelihood.microscope.record import SampledTrajectory
from services.likelihood.records import (
    RUN_NAME,
    EventRecord,
    RunInfo,
    StepReceipt,
    StepRecord,
    StoredStep,
    TrajectoryRecord,
)
from services.likelihood.store.base import MAX_RUNS, SAMPLE_STEPS, NotStored
from services.likelihood.store.sqlite.store import SQLiteStore

T = TypeVar("T")
log = logging.getLogger(__name__)
OPEN = 16
"""Files that stay open, those that were asked last: each thread has a connection of its own to each."""
Stamp = tuple[tuple[int, int], ...]


def stores_in(folder: Path) -> list[Path]:
    """The stores of the runs that lie in a folder."""
    return sorted(folder.glob(f"*/{STORE}")) if folder.is_dir() else []


@dataclass
class _File:
    """One store, as it was at the last look."""

    stamp: Stamp
    infos: list[RunInfo]


@dataclass
class _Opened:
    store: SQLiteStore
    users: int = 0


@dataclass(frozen=True)
class _Place:
    """Where a run is."""

    file: Path
    name: str
    """The run's name in there."""
    info: RunInfo = field(compare=False)


class FolderStore:
    """See LikelihoodStore. A file that cannot be read is logged once, and left out."""

    def __init__(self, folder: Path, token_steps: int = 8, sample_steps: int = SAMPLE_STEPS) -> None:
        self.folder = folder
        self.token_steps = token_steps
        self.sample_steps = sample_steps
        self._files: dict[Path, _File] = {}
        self._places: dict[str, _Place] = {}
        self._opened: OrderedDict[Path, _Opened] = OrderedDict()
        self._unread: dict[Path, str] = {}
        self._guard = threading.Lock()
        self._looking = threading.Lock()
        self.look()

    # ---- which runs there are

    def look(self) -> set[str]:
        """Read anew what has changed on the disk. Returns the runs that came, went, or were posted to."""
        with self._looking:
            files: dict[Path, _File] = {}
            for path in stores_in(self.folder):
                stamp = _stamp(path)
                known = self._files.get(path)
                if known is not None and known.stamp == stamp:
                    files[path] = known
                elif (infos := self._read(path)) is not None:
                    files[path] = _File(_stamp(path), infos)
            self._files = files
            before = self._places
            self._places = _named(files)
            everything = before.keys() | self._places.keys()
            return {run for run in everything if _info(before, run) != _info(self._places, run)}

    def run_folder(self, run: str) -> Path | None:
        """The folder in which a run's store lies."""
        place = self._places.get(run)
        return place.file.parent if place else None

    def _read(self, path: Path) -> list[RunInfo] | None:
        try:
            with self._using(path) as store:
                return store.runs()
        except (EnvironmentLacks, UserError) as e:
            if self._unread.get(path) != str(e):
                log.warning("left out: %s", e)
            self._unread[path] = str(e)
            return None

    @contextmanager
    def _using(self, path: Path) -> Iterator[SQLiteStore]:
        """A store that stays open inside."""
        with self._guard:
            one = self._opened.get(path)
            if one is None:
                one = self._opened[path] = _Opened(SQLiteStore(path, self.token_steps, self.sample_steps))
            one.users += 1
            self._opened.move_to_end(path)
        try:
            yield one.store
        finally:
            with self._guard:
                one.users -= 1
                idle = [place for place, other in self._opened.items() if not other.users]
                for place in idle[: max(0, len(self._opened) - OPEN)]:
                    self._opened.pop(place).store.close()

    def _in(self, run: str, does: Callable[[SQLiteStore, str], T]) -> T:
        """What the run's own store answers. Raises NotStored."""
        place = self._places.get(run)
        if place is None:
            self.look()
            place = self._places.get(run)
        if place is None:
            raise NotStored(f"run {run}: none of that name in {self.folder}")
        with self._using(place.file) as store:
            return does(store, place.name)

    def _write(self, run: str, does: Callable[[SQLiteStore, str], T]) -> T:
        try:
            return self._in(run, does)
        except NotStored as e:
            raise UserError(
                f"run {run}: {self.folder} is a folder of runs, and takes no further one; post to a service "
                "on a store of its own (`unspiral serve likelihood --store FILE`)",
                status=409,
            ) from e

    # ---- what a store does

    def put_step(self, run: str, record: StepRecord) -> StepReceipt:
        receipt = self._write(run, lambda store, name: store.put_step(name, record))
        return receipt.model_copy(update={"run": run})

    def put_tokens(self, run: str, step: int, attempt: int, body: bytes) -> None:
        self._write(run, lambda store, name: store.put_tokens(name, step, attempt, body))

    def get_tokens(self, run: str, step: int) -> bytes | None:
        return self._in(run, lambda store, name: store.get_tokens(name, step))

    def put_samples(self, run: str, step: int, attempt: int, trajectories: list[SampledTrajectory]) -> int:
        return self._write(run, lambda store, name: store.put_samples(name, step, attempt, trajectories))

    def sample_heads(self, run: str, step: int) -> list[SampleHead]:
        return self._in(run, lambda store, name: store.sample_heads(name, step))

    def samples(self, run: str, step: int, group: str | None = None) -> list[SampledTrajectory]:
        return self._in(run, lambda store, name: store.samples(name, step, group))

    def sampled_steps(self, run: str) -> dict[int, int]:
        return self._in(run, lambda store, name: store.sampled_steps(name))

    def prompts(self, run: str, limit: int = MOST_PROMPTS) -> list[KeptPrompt]:
        return self._in(run, lambda store, name: store.prompts(name, limit))

    def prompt_groups(self, run: str, prompt: str) -> dict[int, list[str]]:
        return self._in(run, lambda store, name: store.prompt_groups(name, prompt))

    def runs(self, limit: int = MAX_RUNS) -> list[RunInfo]:
        self.look()
        infos = [place.info for place in self._places.values()]
        return sorted(infos, key=lambda info: info.updated, reverse=True)[:limit]

    def info(self, run: str) -> RunInfo:
        return self._in(run, lambda store, name: store.info(name)).model_copy(update={"run": run})

    def metric_names(self, run: str) -> list[str]:
        return self._in(run, lambda store, name: store.metric_names(name))

    def columns(self, run: str, names: Iterable[str], first: int, last: int) -> dict[str, np.ndarray]:
        return self._in(run, lambda store, name: store.columns(name, names, first, last))

    def curve(self, run: str, name: str, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        return self._in(run, lambda store, inner: store.curve(inner, name, first, last))

    def steps(self, run: str, first: int, last: int, limit: int = 1000) -> list[StoredStep]:
        return self._in(run, lambda store, name: store.steps(name, first, last, limit))

    def trajectories(self, run: str, step: int) -> list[TrajectoryRecord]:
        return self._in(run, lambda store, name: store.trajectories(name, step))

    def trajectory_counts(self, run: str, step: int) -> tuple[int, int]:
        return self._in(run, lambda store, name: store.trajectory_counts(name, step))

    def save_monitor(
        self, run: str, step: int, state: dict[str, Any], alarms: list[dict], phases: Mapping[int, int]
    ) -> None:
        self._write(run, lambda store, name: store.save_monitor(name, step, state, alarms, phases))

    def load_monitor(self, run: str, before: int) -> tuple[int, dict[str, Any]] | None:
        return self._in(run, lambda store, name: store.load_monitor(name, before))

    def alarms(self, run: str) -> list[dict]:
        return self._in(run, lambda store, name: store.alarms(name))

    def put_event(self, run: str, event: EventRecord) -> None:
        self._write(run, lambda store, name: store.put_event(name, event))

    def events(self, run: str, limit: int = 1000, kind: str | None = None) -> list[dict]:
        return self._in(run, lambda store, name: store.events(name, limit, kind))

    def put_about(self, run: str, changes: dict[str, Any]) -> None:
        self._write(run, lambda store, name: store.put_about(name, changes))

    def about(self, run: str) -> dict[str, Any]:
        return self._in(run, lambda store, name: store.about(name))

    def put_labels(self, run: str, changes: dict[str, Any]) -> None:
        self._in(run, lambda store, name: store.put_labels(name, changes))

    def delete_trajectories(self, run: str, below: int) -> int:
        return self._in(run, lambda store, name: store.delete_trajectories(name, below))

    def delete_run(self, run: str) -> None:
        self._in(run, lambda store, name: store.delete_run(name))
        self.look()

    def compact(self) -> None:
        for path in list(self._files):
            with self._using(path) as store:
                store.compact()

    def ping(self) -> None:
        if not self.folder.is_dir():
            raise EnvironmentLacks(f"likelihood store {self.folder}: no such folder any more")

    def close(self) -> None:
        with self._guard:
            while self._opened:
                self._opened.popitem()[1].store.close()


def _named(files: dict[Path, _File]) -> dict[str, _Place]:
    """The runs by the names that they have here: their folder's, where it can be one and a file holds one run
    alone; otherwise their own, with the folder's before it where two would be called alike."""
    wanted: list[tuple[str, _Place]] = []
    for path, file in files.items():
        folder = re.sub(r"[^A-Za-z0-9._-]", "_", path.parent.name)
        for info in file.infos:
            alone = len(file.infos) == 1 and RUN_NAME.fullmatch(folder)
            wanted.append((folder if alone else info.run, _Place(path, info.run, info)))
    count = Counter(name for name, _ in wanted)
    found: dict[str, _Place] = {}
    for name, place in wanted:
        # The one whose folder is called so keeps the name.
        if count[name] > 1 and place.file.parent.name != name:
            name = f"{re.sub(r'[^A-Za-z0-9._-]', '_', place.file.parent.name)}.{name}"[:128]
        info = place.info.model_copy(update={"run": name})
        found.setdefault(name, _Place(place.file, place.name, info))
    return found


def _info(places: dict[str, _Place], run: str) -> RunInfo | None:
    place = places.get(run)
    return place.info if place else None


def _stamp(path: Path) -> Stamp:
    """What changes whenever a store is written to: of the file, and of the log of writes beside it."""
    found = []
    for one in (path, path.with_name(path.name + "-wal")):
        try:
            seen = one.stat()
        except FileNotFoundError:
            continue
        if seen.st_size:
            found.append((seen.st_mtime_ns, seen.st_size))
    return tuple(found)
