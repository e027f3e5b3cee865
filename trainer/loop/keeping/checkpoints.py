"""A run's checkpoints: when one is due, and what is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.learner.checkpoint import CheckpointNotWritten, fault, step_folder
from trainer.learner.group import LearnerError
from trainer.loop.keeping.replaced_state import replace_state
from trainer.loop.run.progress import Progress
from trainer.loop.run.run_state import RunState
from trainer.loop.run.spans import StepClock
from trainer.loop.run.system import StopRequests
from trainer.loop.update.learner_calls import LearnerCalls

KEEP_SECONDS = 60.0
"""Longest wait for the store before a checkpoint: the steps before it are not taken again. What the store has
not got by then goes to the disk."""


class Checkpoints:
    """Saves the run where `RunState.checkpointable` allows it, and prunes what is old."""

    def __init__(
        self,
        state: RunState,
        progress: Progress,
        stop: StopRequests,
        clock: StepClock,
        on_learner: LearnerCalls,
    ) -> None:
        self.state = state
        self.system = state.system
        self.progress = progress
        self.stop = stop
        self.clock = clock
        self.on_learner = on_learner

    def best_is_new(self) -> bool:
        """Whether this step has the best score, and `trainer.keep_best` keeps its checkpoint."""
        return self.state.config.trainer.keep_best and self.state.best.step == self.state.step

    def due(self) -> bool:
        """Whether this step is saved: by `trainer.checkpoint_every`, or as the best."""
        every = self.state.config.trainer.checkpoint_every
        return bool(every and self.state.step % every == 0) or self.best_is_new()

    async def save(self) -> None:
        """Save everything that a resumed run needs, then prune older checkpoints. A step that is saved
        already, and whole, is not saved again."""
        state = self.state
        self.system.folder.hold()
        folder = self.system.folder.path
        target = step_folder(folder, state.step)
        if state.step == 0 or (target.exists() and await asyncio.to_thread(fault, target) is None):
            return
        with self.stop.saving(), self.clock.measure("checkpoint"):
            # Before the learner's part: a checkpoint promises that its steps need not be taken again, their
            # records included.
            await asyncio.to_thread(self.system.store.keep, KEEP_SECONDS)
            await self.on_learner(self.system.learner.save, target, state.state_dict())
            await asyncio.to_thread(state.best.keep, folder, state.config.trainer)  # gigabytes are deleted
            self.system.folder.event("checkpoint", step=state.step, path=str(target.relative_to(folder)))

    async def keep_scores(self) -> None:
        """Add the scores after the end of the run to its last checkpoint: a run that goes on from it may
        compare them by another score (`trainer.best_by`). All is trained and saved by then, so that a full
        disk ends nothing here."""
        state = self.state
        folder = self.system.folder.path
        target = step_folder(folder, state.step)
        if state.step == 0:
            return
        if await asyncio.to_thread(fault, target, checksums=False) is not None:
            await self.save()
            return
        with self.stop.saving(), self.clock.measure("checkpoint"):
            with self._or_told("warning: the scores after the run are in no checkpoint"):
                await asyncio.to_thread(replace_state, target, state.state_dict())
            await asyncio.to_thread(state.best.keep, folder, state.config.trainer)

    async def save_before_leaving(self) -> None:
        """Save the last whole step of a run that is cut short, if the learner still has its weights. A
        failure is reported, and hides no other error."""
        if not self.state.checkpointable:
            return
        step = self.state.step
        self.progress.say(f"saving step {step}")
        with self._or_told(f"step {step} was not saved"):
            await self.save()

    @contextmanager
    def _or_told(self, line: str) -> Iterator[None]:
        """What cannot be saved is told, with its reason, and ends nothing."""
        try:
            yield
        except (LearnerError, CheckpointNotWritten) as error:
            self.progress.say(f"{line}: {error}")
