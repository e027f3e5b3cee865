"""Where the time of each step went, span by span, always on: `spans/step_000001.json` in the run's folder.

Times are seconds of CLOCK_MONOTONIC. The driver's spans are by the driver's clock, those of a trajectory by
its worker's; that it was asked for and received by the driver's, too, ties the two together. The newest
KEPT_STEPS files stay.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from services.common.errors import UserError
from services.common.files import write_atomically
from services.common.printing.messages import said
from services.common.validation import fitting
from services.contracts import Span, Trajectory

FOLDER = "spans"
KEPT_STEPS = 100
"""Newest steps whose spans are kept."""
MOST_TRAJECTORIES = 4096
"""Trajectories of a step whose spans are kept; the others are counted."""


class Stored(BaseModel):
    """A part of a file of spans. Fields of later versions are passed over."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class TrajectorySpans(Stored):
    """One trajectory on its worker."""

    uid: str
    worker: str
    asked: float
    """When the driver sent it to the worker, by the driver's clock."""
    received: float
    """When the driver had it, by the driver's clock."""
    spans: list[Span]
    """By the worker's clock; the first is the whole trajectory, the others its generations and searches."""


class StepSpans(Stored):
    """The spans of one step."""

    version: int = 1
    step: int
    attempt: int
    began: float
    """By the driver's clock."""
    ended: float
    """When its metrics were written."""
    began_at: float
    """`began` as seconds since 1970, for people."""
    driver: list[Span]
    """Of the driver; spans between this step and the one before, as of a checkpoint, are among them."""
    trajectories: list[TrajectorySpans]
    left_out: int = 0
    """Trajectories beyond MOST_TRAJECTORIES."""


class StepClock:
    """The driver's spans of the step in hand. Spans may be measured from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._began = time.monotonic()

    def begin(self) -> None:
        """A step begins."""
        self._began = time.monotonic()

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """The block inside is a span."""
        began = time.monotonic()
        try:
            yield
        finally:
            span = Span(name, began, time.monotonic() - began)
            with self._lock:
                self._spans.append(span)

    def end(self) -> tuple[float, list[Span]]:
        """When the step began, and all spans since the end of the one before."""
        with self._lock:
            spans = self._spans
            self._spans = []
        return self._began, spans


def write_spans(
    run: Path, step: int, attempt: int, began: float, driver: list[Span], trajectories: Sequence[Trajectory]
) -> Path:
    """Write a step's file, and remove those of steps that are too old. driver: spans by this process's clock;
    began: by it, too. Returns the file."""
    now = time.monotonic()
    # Without the driver's own times a trajectory's spans stand on another machine's clock.
    timed = [t for t in trajectories if t.spans and t.round_trip]
    kept = timed[:MOST_TRAJECTORIES]
    content = {
        "version": 1,
        "step": step,
        "attempt": attempt,
        "began": began,
        "ended": now,
        "began_at": time.time() - (now - began),
        "driver": _plain(driver),
        "trajectories": [
            {
                "uid": t.uid,
                "worker": t.worker,
                "asked": t.round_trip[0],
                "received": t.round_trip[1],
                "spans": _plain(t.spans),
            }
            for t in kept
            if t.round_trip is not None
        ],
        "left_out": len(timed) - len(kept),
    }
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    file = spans_file(run, step)
    write_atomically(file, orjson.dumps(content))
    for name in os.listdir(folder):
        number = step_in(name)
        if number is not None and number <= step - KEPT_STEPS:
            (folder / name).unlink(missing_ok=True)
    return file


def _plain(spans: Sequence[Span]) -> list[tuple[str, float, float]]:
    """Spans to a microsecond."""
    return [(name, round(began, 6), round(seconds, 6)) for name, began, seconds in spans]


def spans_file(run: Path, step: int) -> Path:
    """The file of a step's spans."""
    return run / FOLDER / f"step_{step:06d}.json"


def step_in(name: str) -> int | None:
    """The step in the name of such a file; None where it is another's."""
    number = name.removeprefix("step_").removesuffix(".json")
    return int(number) if number.isdecimal() and name == f"step_{int(number):06d}.json" else None


def steps_with_spans(run: Path) -> list[int]:
    """The steps of a run whose spans are there, in order."""
    folder = run / FOLDER
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted(step for name in names if (step := step_in(name)) is not None)


def read_spans(run: Path, step: int) -> StepSpans:
    """A step's spans. Raises UserError, which names the steps that are there."""
    file = spans_file(run, step)
    if not file.is_file():
        there = steps_with_spans(run)
        kept = f"there are those of steps {there[0]} to {there[-1]}" if there else "there are none"
        raise UserError(f"{run}: no spans of step {step}; {kept} (the newest {KEPT_STEPS} are kept)")

    def torn(mistakes: ValidationError) -> UserError:
        first = mistakes.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        return UserError(f"{file}: no file of spans: {place}: {said(first['msg'])}")

    with fitting(torn):
        return StepSpans.model_validate_json(file.read_bytes())
