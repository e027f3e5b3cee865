"""`unspiral trace`: the spans of a step as a trace-event file, which Perfetto (ui.perfetto.dev) and
chrome://tracing show.

The driver is one process of the file, each worker another. What overlaps lies in lanes (threads) of its own,
so that in a lane spans are nested or apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from services.common.errors import UserError
from services.common.files import write_atomically
from services.common.runs.paths import is_run, no_run_in, refuse_to_lose_records, run_folder
from services.common.users_files import make_folder, refuse_no_file, refuse_to_replace
from services.contracts import Span
from trainer.loop.run.spans import StepSpans, TrajectorySpans, read_spans, steps_with_spans

FOLDER = "traces"
"""Of a run's folder."""
MICRO = 1e6
DRIVER = 1
"""Id of the driver's process in the file; the workers' follow."""
ROUNDING = 2e-6
"""Seconds by which a span may end after the one that it lies in: both are kept to a microsecond."""


@dataclass(frozen=True)
class Offset:
    """What is to be added to a worker's clock to have the driver's, in seconds."""

    seconds: float
    within: float
    """The most by which it may be wrong; 0 for a worker whose clock is the driver's."""

    def __str__(self) -> str:
        if not self.seconds:
            return "as the driver's"
        return f"{self.seconds:+.6f} s added, right within {self.within:.6f} s"


def write_trace(
    given: str, step: int | None, out: Path | None, *, overwrite: bool = False
) -> tuple[Path, StepSpans]:
    """Write the trace of a step of a run (as `run_folder` finds it) to `out`, or to
    `traces/step_STEP.json` in the run's folder. step: None is the newest. overwrite: whether `out` may be
    there. Returns the file and what is in it. Raises UserError."""
    run = run_folder(given)
    if not is_run(run):
        raise UserError(f"{given}: {no_run_in(run)}")
    if out is not None:
        refuse_no_file("--out", out)
        refuse_to_lose_records("--out", out, [run])
        refuse_to_replace(f"--out {out}", out, overwrite)
    if step is None:
        step = max(steps_with_spans(run), default=1)  # where none is there, the reading says so
    spans = read_spans(run, step)
    file = out or run / FOLDER / f"step_{step:06d}.json"
    if out is None:
        make_folder(file.parent, str(file.parent))
    write_atomically(file, orjson.dumps(trace_of(spans, run.name)))
    return file, spans


def trace_of(spans: StepSpans, run: str) -> dict[str, Any]:
    """The trace of a step: a JSON object of the Trace Event Format. Times are microseconds from the first
    span on."""
    by_worker: dict[str, list[TrajectorySpans]] = defaultdict(list)
    for t in spans.trajectories:
        by_worker[t.worker].append(t)
    offsets = {worker: offset_of(ts) for worker, ts in by_worker.items()}
    moved = {w: [_moved(t, offsets[w].seconds) for t in ts] for w, ts in sorted(by_worker.items())}
    whole = Span(f"step {spans.step}", spans.began, spans.ended - spans.began)
    starts = [s.began for s in (whole, *spans.driver)]
    starts += [t.spans[0].began for ts in moved.values() for t in ts]
    zero = min(starts)
    events = list(_driver_events([whole, *spans.driver], zero))
    for place, (worker, trajectories) in enumerate(moved.items(), 1):
        events += _worker_events(worker, DRIVER + place, trajectories, zero)
    clocks = {worker: str(offset) for worker, offset in offsets.items()}
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "run": run,
            "step": spans.step,
            "attempt": spans.attempt,
            "began_at": spans.began_at,
            "trajectories_left_out": spans.left_out,
            "clocks": clocks,
        },
    }


def offset_of(trajectories: Sequence[TrajectorySpans]) -> Offset:
    """The offset of one worker's clock. A trajectory can't begin before it was asked for, nor be received
    before it ended: this bounds the offset from both sides. Where 0 fits, both clocks are one host's."""
    low = max(t.asked - t.spans[0].began for t in trajectories)
    high = min(t.received - (t.spans[0].began + t.spans[0].seconds) for t in trajectories)
    if low <= ROUNDING and high >= -ROUNDING:
        return Offset(0.0, 0.0)
    return Offset((low + high) / 2, abs(high - low) / 2)


def _moved(t: TrajectorySpans, seconds: float) -> TrajectorySpans:
    """By the driver's clock."""
    return t.model_copy(update={"spans": [s._replace(began=s.began + seconds) for s in t.spans]})


def _driver_events(spans: list[Span], zero: float) -> Iterator[dict[str, Any]]:
    yield _name("process_name", DRIVER, 0, "driver")
    lanes = Lanes()
    for span in sorted(spans, key=lambda s: (s.began, -s.seconds)):
        lane = lanes.place([span])
        yield _event(span, "driver", DRIVER, lane, zero)
    yield from (_name("thread_name", DRIVER, lane, "steps") for lane in lanes)


def _worker_events(
    worker: str, pid: int, trajectories: list[TrajectorySpans], zero: float
) -> Iterator[dict[str, Any]]:
    yield _name("process_name", pid, 0, f"worker {worker}" if worker else "worker")
    lanes = Lanes()
    for t in sorted(trajectories, key=lambda t: t.spans[0].began):
        first, *parts = t.spans
        lane = lanes.place(t.spans)
        yield _event(first._replace(name=t.uid), "trajectory", pid, lane, zero, {"uid": t.uid})
        for part in parts:
            kind = "search" if part.name == "search" else "rollout"
            yield _event(part, kind, pid, lane, zero, {"uid": t.uid})
    yield from (_name("thread_name", pid, lane, "rollouts") for lane in lanes)


class Lanes:
    """Lanes in which spans are nested or apart, numbered from 1."""

    def __init__(self) -> None:
        self._open: list[list[float]] = []
        """Ends of the spans that are open in each lane, the innermost last."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(1, len(self._open) + 1))

    def place(self, spans: Sequence[Span]) -> int:
        """The first lane in which `spans[0]` has room. The others lie within it. Spans come by their
        beginning; of those that begin together the longest first."""
        began = spans[0].began
        end = began + spans[0].seconds
        for number, ends in enumerate(self._open, 1):
            while ends and ends[-1] <= began + ROUNDING:
                ends.pop()
            if not ends or (len(spans) == 1 and end <= ends[-1] + ROUNDING):
                ends.append(end)
                return number
        self._open.append([end])
        return len(self._open)


def _event(
    span: Span, category: str, pid: int, tid: int, zero: float, args: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A complete event."""
    return {
        "name": span.name,
        "cat": category,
        "ph": "X",
        "ts": round((span.began - zero) * MICRO),
        "dur": round(span.seconds * MICRO),
        "pid": pid,
        "tid": tid,
        "args": args or {},
    }


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    """A name that the viewer shows for a process or a lane."""
    return {"name": what, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": {"name": name}}
