"""What is written of a step: its line of metrics, its records in the store, the monitor's verdict."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.likelihood.metrics.scored_step import ScoredStep
from services.likelihood.monitor.phases import PhaseMonitor, PhaseState
from services.likelihood.records import EventRecord, StepRecord
from services.worker_state import WorkerState
from trainer.learner.results import UpdateResult
from trainer.loop.records.machine import MachineUse
from trainer.loop.records.microscope import Microscope
from trainer.loop.records.tracking import Tracking
from trainer.loop.rollouts.sampling import RolloutBatch
from trainer.loop.run import sources
from trainer.loop.run.progress import Progress
from trainer.loop.run.run_folder import finite_or_none
from trainer.loop.run.system import System
from trainer.loop.update.probes import Rescored

LAST_REWARDS = 10
"""Steps whose mean reward `unspiral status` shows."""


@dataclass(frozen=True)
class StepTimes:
    """Wall time of the parts of a step, in seconds. With asynchronous rollouts they overlap."""

    began: float
    """When the step began: time.monotonic()."""
    rollout_wait: float
    """From then until the step's batch was there."""
    update: float
    sync: float
    rescore: float


@dataclass(frozen=True)
class StepResult:
    """A step whose update is over and whose weights the workers hold."""

    step: int
    attempt: int
    version: int
    """Of the weights after the update."""
    batch: RolloutBatch
    update: UpdateResult
    scored: ScoredStep
    rescored: Rescored
    llds_lambda: float
    """The weight of LLDS in this update, after what the monitor may have changed."""
    lr_scale: float
    """The factor on the learning rate that the monitor has set."""
    sync_bytes: int
    times: StepTimes

    def metrics(self) -> dict[str, Any]:
        """The step's line in metrics.jsonl, but its phase. `time/step` ends here."""
        own: dict[str, Any] = {
            "step": self.step,
            "attempt": self.attempt,
            "policy_version": self.version,
        }
        if len(self.batch.em):
            own["reward/em"] = float(self.batch.em.mean())
            own |= sources.training(
                (t.question.data_source, t.group, float(em))
                for t, em in zip(self.batch.trajectories, self.batch.em, strict=True)
            )
        if known := [right for right in self.scored.right or () if right is not None]:
            own["reward/right"] = sum(known) / len(known)
        return (
            own
            | self.scored.metrics(self.batch.seconds)
            | self.update.metrics
            | self.rescored.metrics
            | self.batch.counts
            | {
                "llds/lambda": self.llds_lambda,
                "learner/lr_scale": self.lr_scale,
                "sync/bytes": float(self.sync_bytes),
                "time/rollout": self.batch.seconds,
                "time/rollout_wait": self.times.rollout_wait,
                "time/update": self.times.update,
                "time/sync": self.times.sync,
                "time/logprob": self.times.rescore,
                "time/step": time.monotonic() - self.times.began,
            }
        )


class Recorder:
    """Writes steps and events to the run's folder, the store and the terminal."""

    def __init__(self, system: System, monitor: PhaseMonitor, progress: Progress) -> None:
        self.system = system
        self.monitor = monitor
        self.progress = progress
        self.microscope = Microscope(system)
        config = system.config
        self.tracking = Tracking(config.tracking, config.run.name, config.run_dir, progress.say)
        self.machine = MachineUse()
        self.rewards: deque[float | None] = deque(maxlen=LAST_REWARDS)
        """Mean reward of the last steps."""

    def begin_attempt(self) -> None:
        """Forget what earlier attempts left of steps that come again."""
        self.rewards.clear()
        self.microscope.begin_attempt()

    def step(self, result: StepResult, metrics: dict[str, Any], repeated: Mapping[str, float]) -> PhaseState:
        """Name the phase, write the run's files, and give the store its copy, which it takes in the
        background. metrics: `result.metrics()`. repeated: those of them that are scores of the weights which
        the step began with; trackers have them already."""
        folder = self.system.folder
        numbers: dict[str, float | None] = {k: v for k, v in metrics.items() if isinstance(v, int | float)}
        state = self.monitor.update(numbers)
        metrics["phase"] = state.phase
        for alarm in state.alarms:
            folder.event("alarm", at_step=result.step, **alarm.as_dict())
        self.rewards.append(finite_or_none(metrics.get("reward/mean")))
        folder.metrics(metrics)
        self.tracking.step({name: value for name, value in metrics.items() if name not in repeated})
        self._store(result, numbers, [alarm.rule for alarm in state.active])
        self.progress.step(metrics, state.alarms, state.active)
        return state

    def evaluation(self, event: EventRecord) -> None:
        """The scores of an evaluation, when it is made: to the store and the trackers."""
        self.system.store.post_event(self.system.config.run.name, event)
        self.tracking.step({**event.data["metrics"], "step": max(event.step, 1)})  # as the curves show them

    def close(self) -> None:
        """Hand over what the trackers have not got, and watch the machine no further."""
        self.tracking.close()
        self.machine.close()

    def _store(self, result: StepResult, numbers: dict[str, float | None], rules: list[str]) -> None:
        store = self.system.store
        run = self.system.config.run.name
        # First: once the store's thread writes the step out, this one would wait for it.
        min_drop = result.update.metrics.get("llds/min_drop", 0.0)
        slide = self.microscope.slide(result.scored, result.llds_lambda, min_drop, rules)
        fields: dict[str, Any] = {
            "step": result.step,
            "attempt": result.attempt,
            "policy_version": result.version - 1,
            "metrics": numbers | self.machine.metrics() | {"rollout/workers": self._serving()},
            # Plain dicts, and not validated: there are thousands in a step, and they were made right here.
            "trajectories": result.scored.records(),
        }
        store.post_step(run, StepRecord.model_construct(**fields))
        store.put_tokens(run, result.step, result.scored.tokens, result.attempt)
        if slide:
            store.post_samples(run, result.step, slide, self.microscope.lens, result.attempt)
        if probe := self.microscope.probe(result.rescored.fixed):
            store.post_probes(run, result.step, probe, self.microscope.lens, result.attempt)

    def _serving(self) -> float:
        """Rollout workers that serve."""
        return float(sum(worker.state is WorkerState.READY for worker in self.system.pool.workers()))

    def event(self, event: EventRecord) -> None:
        """Something that the monitor did: into the run's folder, the store and the terminal."""
        data = {k: v for k, v in event.data.items() if k != "step"}
        self.system.folder.event(event.kind, step=event.step, text=event.text, **data)
        self.system.store.post_event(self.system.config.run.name, event)
        self.progress.say(f"step {event.step}: {event.kind.replace('_', ' ')}: {event.text}")
