"""Held-out scores of a run: the event that carries an evaluation, and its scores in the run's curves.

A step's line comes before the evaluation of its weights, and after the last step no line comes. So an
evaluation is an event of kind `evaluation`, posted when it is made. Its `data.metrics` are scores by the
names of their curves; they are shown at the step whose weights were scored. Monitors read lines alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from services.common.validation import number_of
from services.likelihood.records import MAX_STEP, EventRecord, RunInfo, StoredStep
from services.likelihood.store.base import EVALUATION, LikelihoodStore

MOST_EVENTS = 10_000
NAMES = {"em": "EM", "f1": "F1"}
"""Scores that have another name in words."""


def evaluation_text(tag: str, mode: str, overall: Mapping[str, Any]) -> str:
    """One line for people, such as `after, greedy: EM 0.970, F1 0.970, n 200`."""
    scores = ", ".join(
        f"{NAMES.get(name, name)} {value:.3f}" if isinstance(value, float) else f"{name} {value}"
        for name, value in overall.items()
    )
    return f"{tag}, {mode}: {scores}"


def evaluation_event(
    step: int, attempt: int, tag: str, mode: str, overall: Mapping[str, Any], metrics: Mapping[str, Any]
) -> EventRecord:
    """The event of one evaluation. metrics: its scores by the names of their curves."""
    data = {"tag": tag, "mode": mode, "attempt": attempt, "overall": dict(overall), "metrics": dict(metrics)}
    return EventRecord(step=step, kind=EVALUATION, text=evaluation_text(tag, mode, overall)[:2000], data=data)


@dataclass
class HeldOut:
    """The scores that a run's evaluations posted, to be laid over its stored curves."""

    at: dict[str, dict[int, float]] = field(default_factory=dict)
    """Score by the step where it is shown, by name of the curve."""
    repeated: dict[str, dict[int, float]] = field(default_factory=dict)
    """The step after, whose line may repeat the score: there it counts once."""
    later: list[str] = field(default_factory=list)
    """Names with a score of the weights after the run's last step, which no line has."""
    times: dict[int, float] = field(default_factory=dict)
    """Unix seconds of the last evaluation that is shown at a step."""

    @property
    def last(self) -> int | None:
        """The last step with a score."""
        return max((step for scores in self.at.values() for step in scores), default=None)

    @property
    def latest(self) -> dict[str, float]:
        """The newest score by name of the curve."""
        return {name: scores[max(scores)] for name, scores in self.at.items()}

    def curve(
        self, name: str, stored: tuple[np.ndarray, np.ndarray], first: int, last: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a curve from `first` to `last`, as the store gives them, with these scores."""
        if name not in self.at:
            return stored
        points = dict(zip(stored[0].tolist(), stored[1].tolist(), strict=True))
        self._lay(points, name)
        chosen = sorted((step, value) for step, value in points.items() if first <= step <= last)
        return np.array([s for s, _ in chosen], np.int64), np.array([v for _, v in chosen], np.float64)

    def line(self, step: int, metrics: Mapping[str, float | None]) -> dict[str, float | None]:
        """The metrics of a step's line, with these scores."""
        out = dict(metrics)
        for name in self.at:
            points = {step: out[name]} if name in out else {}
            self._lay(points, name)
            out.pop(name, None)
            if step in points:
                out[name] = points[step]
        return out

    def _lay(self, points: dict[int, Any], name: str) -> None:
        for step, value in self.repeated[name].items():
            if points.get(step) == value:
                del points[step]
        points.update(self.at[name])


def held_out_of(store: LikelihoodStore, info: RunInfo) -> HeldOut:
    """What the evaluations of a run say, without those of steps that a later attempt has made again. Scores
    from before the first step are shown at the first one."""
    found = HeldOut()
    for event in store.events(info.run, MOST_EVENTS, EVALUATION):
        step = event["step"]
        scores = _scores(event)
        if not scores or _superseded(store, info, step, event["data"].get("attempt")):
            continue
        shown = max(step, info.first_step or 0)
        found.times[shown] = event["time"]
        for name, value in scores:
            found.at.setdefault(name, {})[shown] = value
            found.repeated.setdefault(name, {})[step + 1] = value
    last = math.inf if info.last_step is None else info.last_step
    found.later = [name for name, scores in found.repeated.items() if max(scores) > last]
    return found


def shown_scores(
    store: LikelihoodStore, info: RunInfo, event: EventRecord
) -> tuple[int, dict[str, float | None]]:
    """The step where the scores of an evaluation are shown, and the scores; none of a step that a later
    attempt has made again."""
    attempt = event.data.get("attempt")
    superseded = _superseded(store, info, event.step, attempt)
    scores = () if superseded else _scores(event.model_dump())
    return max(event.step, info.first_step or 0), dict(scores)


def scored_steps(store: LikelihoodStore, run: str) -> Iterator[StoredStep]:
    """All steps of a run in order, each with the held-out scores that are shown at it. A step with an
    evaluation and without a line has its scores alone."""
    info = store.info(run)
    held_out = held_out_of(store, info)
    alone = sorted(held_out.times)
    for stored in _each_step(store, run):
        while alone and alone[0] < stored.step:
            yield _of_scores(held_out, alone.pop(0), info.attempt)
        if alone and alone[0] == stored.step:
            alone.pop(0)
        yield stored.model_copy(update={"metrics": held_out.line(stored.step, stored.metrics)})
    for step in alone:
        yield _of_scores(held_out, step, info.attempt)


def _each_step(store: LikelihoodStore, run: str) -> Iterator[StoredStep]:
    first = 0
    while page := store.steps(run, first, MAX_STEP):
        yield from page
        first = page[-1].step + 1


def _of_scores(held_out: HeldOut, step: int, attempt: int) -> StoredStep:
    return StoredStep(
        step=step,
        attempt=attempt,
        policy_version=None,
        time=held_out.times[step],
        metrics=held_out.line(step, {}),
        trajectories=0,
    )


def _scores(event: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Finite numbers alone: any client may post an event of this kind."""
    metrics = event["data"].get("metrics") if event["kind"] == EVALUATION else None
    items: Iterable[tuple[Any, Any]] = metrics.items() if isinstance(metrics, dict) else ()
    return [(name, number) for name, value in items if (number := number_of(value)) is not None]


def _superseded(store: LikelihoodStore, info: RunInfo, step: int, attempt: Any) -> bool:
    if step == 0:
        return False
    if info.last_step is not None and step > info.last_step:
        return True  # a later attempt went back, and has not come there again
    if not isinstance(attempt, int) or attempt >= info.attempt:
        return False
    return any(line.attempt > attempt for line in store.steps(info.run, step, step))
