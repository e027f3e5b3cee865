"""The likelihood service without its web layer: a store, a phase monitor for each run, and those who
listen."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from services.common.errors import EnvironmentLacks, UserError
from services.likelihood.evaluations import HeldOut, held_out_of, shown_scores
from services.likelihood.exports.mirrors import Mirroring
from services.likelihood.monitor.alarms import PHASES, Rule
from services.likelihood.monitor.phases import READ, PhaseMonitor, PhaseState
from services.likelihood.monitor.readings import possible_values
from services.likelihood.records import (
    MAX_METRICS,
    MAX_STEP,
    EventRecord,
    RunInfo,
    StepReceipt,
    StepRecord,
    StoredStep,
)
from services.likelihood.store import series
from services.likelihood.store.base import EVALUATION, LikelihoodStore, NotStored
from services.settings import MonitorRules

REPLAY = 100  # stored steps read at a time; each may hold thousands of metrics
MAX_VALUES = 500_000
"""Most points of one answer, over all its curves."""
WATCHED_RUNS = 128
"""Runs whose monitors are kept in memory, the latest posted to; others are restored from the store."""
MAX_NAMES = 5000
"""Most names of metrics of one run."""
MAX_LISTENERS = 256
LOCKS = 64


@dataclass
class RunWatch:
    """The monitor of one run. `before` is its state before the last step, for posts that add to that step."""

    monitor: PhaseMonitor
    before: dict[str, Any]
    last: int = -1
    alarms: list[dict] = field(default_factory=list)


class Listener:
    """One open event stream. When it falls `size` events behind, it is told to read everything anew."""

    def __init__(self, loop: asyncio.AbstractEventLoop, size: int = 256):
        self.loop = loop
        self.queue: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue(size)

    def put(self, kind: str, data: dict[str, Any]) -> None:
        """From any thread."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._put, kind, data)

    def _put(self, kind: str, data: dict[str, Any]) -> None:
        if self.queue.full():
            while not self.queue.empty():
                self.queue.get_nowait()
            kind = "reset"
            data = {}
        self.queue.put_nowait((kind, data))


class LikelihoodService:
    """Thread-safe. Every posted step goes to the store, then to the run's monitor, then to the listeners."""

    def __init__(
        self, store: LikelihoodStore, rules: MonitorRules | None = None, mirroring: Mirroring | None = None
    ):
        self.store = store
        self.rules = rules
        self.mirroring = mirroring
        self._watches: OrderedDict[str, RunWatch] = OrderedDict()
        self._names: OrderedDict[str, set[str]] = OrderedDict()
        self._locks = [threading.Lock() for _ in range(LOCKS)]
        self._listeners: dict[str | None, set[Listener]] = defaultdict(set)
        self._guard = threading.Lock()

    def put_step(self, run: str, record: StepRecord) -> StepReceipt:
        with self._lock(run):
            names = self._names_with(run, record)
            receipt = self.store.put_step(run, record)
            _remember(self._names, run, names, self._guard)
            seen = self._observe(run, record.step)
        if seen is None:  # another service has already given the step to a higher attempt
            return receipt
        stored, state, undecided = seen
        self.publish(run, "step", {**stored.model_dump(), "phase": state.phase, "undecided": undecided})
        if self.mirroring:
            held_out = held_out_of(self.store, self.store.info(run))
            metrics = held_out.line(stored.step, stored.metrics)
            self.mirroring.step(run, stored.step, stored.time, metrics, state.phase)
        for alarm in state.alarms:
            self.publish(run, "alarm", alarm.as_dict())
        for alarm in state.cleared:
            self.publish(run, "cleared", alarm.as_dict())
        return receipt

    def put_event(self, run: str, event: EventRecord) -> None:
        with self._lock(run):
            self.store.put_event(run, event)
        self.publish(run, "event", event.model_dump())
        if self.mirroring and event.kind == EVALUATION:
            info = self.store.info(run)
            step, scores = shown_scores(self.store, info, event)
            if scores and info.last_step is not None:  # before the first step, whose line brings them
                self.mirroring.step(run, step, time.time(), scores, None)

    def put_about(self, run: str, changes: dict[str, Any]) -> None:
        """Set what the run says of itself; listeners read it anew."""
        with self._lock(run):
            self.store.put_about(run, changes)
        self.publish(run, "about", {})

    def put_labels(self, run: str, changes: dict[str, Any]) -> RunInfo:
        """Set what people call a run; listeners read it anew."""
        with self._lock(run):
            self.store.put_labels(run, changes)
            info = self.store.info(run)
        self.publish(run, "about", {})
        return info

    def delete_run(self, run: str) -> None:
        """Forget all of a run. A later post makes it anew."""
        with self._lock(run):
            self.store.delete_run(run)
            _forget(self._watches, run, self._guard)
            _forget(self._names, run, self._guard)
        self.publish(run, "reset", {})

    def phase(self, run: str) -> dict[str, Any]:
        """The run's phase now, since which step, and the bands of phases so far."""
        info = self.store.info(run)
        first = info.first_step or 0
        last = -1 if info.last_step is None else info.last_step
        codes = self.store.columns(run, ["phase"], first, last).get("phase")
        found = series.bands(codes, first, list(PHASES)) if codes is not None else []
        now = found[-1] if found else {"phase": "unknown", "first": first}
        return {
            "run": run,
            "step": info.last_step,
            "phase": now["phase"],
            "since": now["first"],
            "bands": found,
        }

    def judged(self, run: str) -> dict[str, Any]:
        """The phase, and which rules cannot judge the run yet."""
        monitor = PhaseMonitor(self.rules)
        kept = self.store.load_monitor(run, MAX_STEP + 1)
        if kept:
            self._take_up(run, monitor, kept)
        later = held_out_of(self.store, self.store.info(run)).later if kept else ()
        return self.phase(run) | {"undecided": monitor.undecided(later) if kept else {}}

    def series(
        self, run: str, names: list[str] | None, first: int | None, last: int | None, points: int
    ) -> dict[str, Any]:
        """Curves of a run, thinned to at most `points` points each, and to MAX_VALUES over all."""
        info = self.store.info(run)
        held_out = held_out_of(self.store, info)
        newest = held_out.last if info.last_step is None else info.last_step
        begin = max(first or 0, info.first_step or 0)
        end = min(MAX_STEP if last is None else last, -1 if newest is None else newest)
        chosen = names if names is not None else self._curve_names(run, held_out.at)
        chosen = chosen[:MAX_METRICS]
        points = max(2, min(points, MAX_VALUES // max(1, len(chosen))))
        curves = (
            (name, held_out.curve(name, self.store.curve(run, name, begin, end), begin, end))
            for name in chosen
            if end >= begin
        )
        return {
            "run": run,
            "attempt": info.attempt,
            "first": info.first_step,
            "last": info.last_step,
            **series.thinned_curves(curves, begin, max(begin, end), points),
        }

    def steps(self, run: str, first: int, limit: int) -> list[StoredStep]:
        """At most `limit` stored steps from `first` on; fewer where they hold many metrics."""
        found: list[StoredStep] = []
        values = 0
        for step in self._stored_from(run, first):
            found.append(step)
            values += len(step.metrics)
            if len(found) == limit or values > MAX_VALUES // 2:
                break
        return found

    def summary(self, run: str) -> dict[str, Any]:
        """What the head of the page shows: the run, its phase, its latest metrics and its alarms that
        stand."""
        return self._summary(run)[0]

    def latest(self, run: str) -> dict[str, Any]:
        """The summary, with each held-out score since its evaluation: a reader who looks now and then would
        miss it at the one step where it is shown."""
        summary, held_out = self._summary(run)
        return summary | {"metrics": held_out.latest | summary["metrics"]}

    def _summary(self, run: str) -> tuple[dict[str, Any], HeldOut]:
        info = self.store.info(run)
        latest = self.store.steps(run, info.last_step, info.last_step) if info.last_step is not None else []
        held_out = held_out_of(self.store, info)
        now = self.phase(run)
        summary = {
            **info.model_dump(),
            "phase": now["phase"],
            "since": now["since"],
            "metrics": held_out.line(latest[0].step, latest[0].metrics) if latest else {},
            "last_step_time": latest[0].time if latest else None,
            "metric_names": list(dict.fromkeys([*self.store.metric_names(run), *held_out.at])),
            "alarms": [a for a in self.store.alarms(run) if a["cleared"] is None],
        }
        return summary, held_out

    def _curve_names(self, run: str, more: Iterable[str]) -> list[str]:
        names = dict.fromkeys([*self.store.metric_names(run), *more])
        return [name for name in names if name != "phase"]

    def _names_with(self, run: str, record: StepRecord) -> set[str]:
        """Names of the run's metrics after this post. Raises UserError for more than a run may have."""
        known = self._names.get(run)
        if known is None:
            try:
                known = set(self.store.metric_names(run))
            except NotStored:
                known = set()
        names = known | record.metrics.keys()
        if len(names) > MAX_NAMES and len(names) > len(known):
            raise UserError(f"run {run}: {len(names)} names of metrics; at most {MAX_NAMES} per run accepted")
        return names

    # ---- the monitor

    def _observe(self, run: str, step: int) -> tuple[StoredStep, PhaseState, dict[Rule, str]] | None:
        """Bring the monitor up to what is stored; after a post for an earlier step, replay from the newest
        kept state below it.

        Returns the newest step, what the monitor says after it, and what it cannot judge yet."""
        watch = self._watches.get(run)
        if watch is None or step < watch.last:
            watch, first = self._restored(run, step)
        elif step == watch.last:  # another post for the newest step: its metrics have grown
            watch.monitor.load_state_dict(watch.before)
            watch.alarms = _as_of(watch.alarms, step - 1)
            first = step
        else:
            first = watch.last + 1
        phases: dict[int, int] = {}
        for stored in self._stored_from(run, first):
            watch.before = watch.monitor.state_dict()
            state = watch.monitor.update({**stored.metrics, "step": stored.step})
            phases[stored.step] = PHASES.index(state.phase)
            for alarm in state.cleared:
                next(a for a in watch.alarms if a["rule"] == alarm.rule and a["cleared"] is None)[
                    "cleared"
                ] = stored.step
            watch.alarms += [a.as_dict() for a in state.alarms]
            for alarm in state.active:  # its confidence may have grown
                next(a for a in watch.alarms if a["rule"] == alarm.rule and a["cleared"] is None).update(
                    alarm.as_dict()
                )
            watch.last = stored.step
        if not phases:
            # Another service has replaced the step meanwhile: what is known here of the run is out of date,
            # and the next post reads it anew.
            _forget(self._watches, run, self._guard)
            return None
        _remember(self._watches, run, watch, self._guard)
        self.store.save_monitor(run, watch.last, watch.monitor.state_dict(), watch.alarms, phases)
        return stored, state, watch.monitor.undecided()

    def _restored(self, run: str, before: int) -> tuple[RunWatch, int]:
        """The monitor as it was kept below a step, and the first step that it has not seen."""
        monitor = PhaseMonitor(self.rules)
        kept = self.store.load_monitor(run, before)
        alarms: list[dict] = []
        if kept:
            self._take_up(run, monitor, kept)
            alarms = _as_of(self.store.alarms(run), kept[0])
        return RunWatch(monitor, {}, alarms=alarms), kept[0] + 1 if kept else 0

    def _take_up(self, run: str, monitor: PhaseMonitor, kept: tuple[int, dict[str, Any]]) -> None:
        """A kept state, by its step. Earlier versions did not count the values of each metric: they are
        counted in what is stored, or what a run cannot be judged by would be forgotten."""
        step, state = kept
        monitor.load_state_dict(state)
        if monitor.counts:
            return
        first = self.store.info(run).first_step or 0
        columns = self.store.columns(run, sorted(READ), first, step) if first <= step else {}
        monitor.counts = {name: possible_values(name, column) for name, column in columns.items()}

    def _stored_from(self, run: str, first: int) -> Iterator[StoredStep]:
        page = self.store.steps(run, first, MAX_STEP, limit=REPLAY)
        yield from page
        while len(page) == REPLAY:
            page = self.store.steps(run, page[-1].step + 1, MAX_STEP, limit=REPLAY)
            yield from page

    def _lock(self, run: str) -> threading.Lock:
        return self._locks[hash(run) % LOCKS]

    # ---- listeners

    def check_listeners(self) -> None:
        """Raise EnvironmentLacks where no further one is served."""
        with self._guard:
            if sum(map(len, self._listeners.values())) >= MAX_LISTENERS:
                raise EnvironmentLacks(
                    f"{MAX_LISTENERS} streams of events are open, the most that are served"
                )

    def listen(self, run: str | None) -> Listener:
        """A stream of what happens in a run; None: in all runs."""
        listener = Listener(asyncio.get_running_loop())
        with self._guard:
            self._listeners[run].add(listener)
        return listener

    def leave(self, run: str | None, listener: Listener) -> None:
        with self._guard:
            self._listeners[run].discard(listener)
            if not self._listeners[run]:
                del self._listeners[run]

    def publish(self, run: str, kind: str, data: dict[str, Any]) -> None:
        with self._guard:
            listeners = [*self._listeners.get(run, ()), *self._listeners.get(None, ())]
        for listener in listeners:
            listener.put(kind, {"run": run, **data})


def _remember(kept: OrderedDict[str, Any], run: str, value: Any, guard: threading.Lock) -> None:
    """Keep the value of the runs that were posted to last."""
    with guard:
        kept[run] = value
        kept.move_to_end(run)
        if len(kept) > WATCHED_RUNS:
            kept.popitem(last=False)


def _forget(kept: OrderedDict[str, Any], run: str, guard: threading.Lock) -> None:
    with guard:
        kept.pop(run, None)


def _as_of(alarms: list[dict], step: int) -> list[dict]:
    """The alarms as they stood after a step."""
    return [
        {**a, "cleared": a["cleared"] if a["cleared"] is not None and a["cleared"] <= step else None}
        for a in alarms
        if a["step"] <= step
    ]
