"""The training loop. `Driver.steps` and `Driver.one_step` are the whole story; the rest serves them.

One step, as data flows:

    prompts ─> pool of rollout workers ─> trajectories ─> rewards ─> advantages
                     ^                                                  │
       weights v+1   │                                                  v
    sync <── learner: pi_old, then optimiser steps of GRPO + lambda * LLDS ──> batch and probes scored again
                                                                        │
                       metrics.jsonl, likelihood store, phase monitor <─┘
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any

from services.common.errors import EnvironmentLacks, UnspiralError
from services.contracts import TrainBatch
from services.likelihood.monitor.actions import MonitorAction
from services.likelihood.records import EventRecord
from trainer.learner.checkpoint import CheckpointNotWritten, drop_after
from trainer.learner.group import LearnerError
from trainer.loop.keeping.checkpoints import Checkpoints
from trainer.loop.keeping.evaluations import Evaluations
from trainer.loop.keeping.restore import restore_learner, roll_back
from trainer.loop.records.recording import Recorder, StepResult, StepTimes
from trainer.loop.records.users_metrics import UsersMetrics
from trainer.loop.rollouts.ahead import BatchesAhead
from trainer.loop.rollouts.notices import Notices
from trainer.loop.rollouts.sampling import BatchSampler, RolloutBatch
from trainer.loop.run.progress import Progress
from trainer.loop.run.run_state import RunState
from trainer.loop.run.spans import StepClock, write_spans
from trainer.loop.run.system import StopRequests, System
from trainer.loop.update.batches import prepare, scored_step, text_of
from trainer.loop.update.learner_calls import LearnerCalls
from trainer.loop.update.probes import Probes, Rescored
from trainer.loop.update.rescoring import Rescoring
from trainer.loop.update.sync import run_with_resync, sync_weights
from trainer.loop.update.updates import Updates

STOPPED_BY_MONITOR = 4
"""Exit status of a run that the monitor ended (monitor.action=stop)."""


class Driver(RunState):
    """Runs the loop over a started system."""

    def __init__(self, system: System, progress: Progress, stop: StopRequests) -> None:
        super().__init__(system)
        self.progress = progress
        self.stop = stop
        self.sampler = BatchSampler(self.config, system.pool, system.cursor, system.reward)
        self.ahead = BatchesAhead(self.config, self.sampler, progress.trajectory)
        self.probes = Probes(
            self.config.probe,
            system.store,
            self.config.run.name,
            system.folder.path,
            self.decode,
            self.config.rollout.group_size,
        )
        self.recorder = Recorder(system, self.monitor, progress)
        self.notices = Notices(progress.say)
        self.metrics = UsersMetrics(system.metrics, progress.say)
        self.clock = StepClock()
        self.on_learner = LearnerCalls(self, progress, self.clock)
        self.updates = Updates(system, self.on_learner)
        self.rescoring = Rescoring(self, self.probes, progress, self.on_learner)
        self.evaluations = Evaluations(
            self, self.sampler, progress, stop, self.clock, self.sync, self.recorder.evaluation
        )
        self.checkpoints = Checkpoints(self, progress, stop, self.clock, self.on_learner)
        self.share_gpus = self.config.rollout.share_gpus
        self.sync_bytes = 0
        """Size of the last version sent."""
        self.sync_seconds: float | None = None
        """Duration of the last sync."""
        self.restores = 0
        """Times that the learner was lost and restored."""
        self.resumed = asyncio.Event()
        """Not set: the control plane has asked that no further step begins."""
        self.resumed.set()
        self.idle = False
        """Whether the run is paused, with no step in hand."""
        self.learner_ranks = list(system.learner.where)

    def decode(self, token_ids: list[int]) -> str:
        """The text of some tokens."""
        return text_of(self.system.tokenizer, token_ids)

    @property
    def rewards(self) -> deque[float | None]:
        """Mean reward of the last steps."""
        return self.recorder.rewards

    # The loop

    async def steps(self, began: float) -> None:
        """Every step that is left. began: time (monotonic) from which `trainer.max_minutes` are counted."""
        while self.step < self.config.trainer.steps and not self.stop.requested:
            await self.until_resumed()
            self.require_folder()
            if self.out_of_time(began) or self.out_of_patience():
                return
            with self.stop.step_in_hand():
                self.in_hand = self.step + 1
                try:
                    action = await self.one_step(self.in_hand)
                finally:
                    self.in_hand = None
                await self.after_step(action)

    async def one_step(self, step: int) -> MonitorAction | None:
        """One step, from prompts to records. Returns what the monitor wants done; a changed lambda or
        learning rate holds from the next step on.

        The numbers of the comments are those of "One step" in docs/architecture.md."""
        began = time.monotonic()
        self.clock.begin()

        # 1, 2. Prompts to trajectories with rewards. Meanwhile the store looks up the lag probe.
        self.probes.ask(step)
        with self.clock.measure("wait for rollouts"):
            batch = await self.next_batch(step)
        waited = time.monotonic() - began

        # 3. Advantages, per group. On shared GPUs the workers' turn is over.
        if self.share_gpus:
            await self.system.pool.sleep()
        with self.clock.measure("advantages"):
            # In a thread: the pool pings its workers on this loop, and takes a silent one for dead.
            prepared = await asyncio.to_thread(prepare, batch, self.config, self.system.tokenizer)

        # 4. pi_old, then the optimiser steps. From here until `after_step` nothing may be saved.
        llds_lambda = self.actions.lambda_of(self.config.algorithm.llds.lambda_)
        lr_scale = self.actions.lr_scale
        self.checkpointable = False
        self.unfinished = step
        with self.clock.measure("update"):
            update, update_seconds = await self.updates.run(
                step, prepared, batch.mean_searches, llds_lambda, lr_scale
            )
        self.step = step
        self.version += 1
        # The batch's own, not the sampler's: batches ahead have moved that one on.
        self.cursor_state = batch.cursor

        # 5, 6. Workers take the new weights; batch and probes are scored under them.
        rescored, sync_seconds, rescore_seconds = await self.sync_and_rescore(prepared.tokens, update.moved)

        # 7. Metrics, records, and the monitor's judgement.
        scored = scored_step(batch, prepared, update, rescored)
        times = StepTimes(began, waited, update_seconds, sync_seconds, rescore_seconds)
        result = StepResult(
            step, self.attempt, self.version, batch, update, scored, rescored, llds_lambda, lr_scale,
            self.sync_bytes, times,
        )  # fmt: skip
        with self.clock.measure("record"):
            action = await self.record(result)
        await asyncio.to_thread(
            write_spans, self.system.folder.path, step, self.attempt, *self.clock.end(), batch.trajectories
        )
        return action

    # Around the loop

    async def run(self) -> dict[str, Any]:
        """All steps from where the run stands, with a learner that is lost restored. Returns the summary."""
        began = time.monotonic()
        while True:
            try:
                return await self.all_steps(began)
            except LearnerError as error:
                await restore_learner(self, error)

    async def all_steps(self, began: float) -> dict[str, Any]:
        """Evaluation, all steps, the last checkpoint, evaluation; up to the first LearnerError."""
        await self.sync()
        await self.evaluations.before()
        try:
            await self.evaluations.left_out()
            await self.steps(began)
        except BaseException as error:  # signals too
            if isinstance(error, LearnerError | CheckpointNotWritten):
                self.checkpointable = False  # trying to save would fail again, and hide the cause
            await self.cancel_ahead()
            await self.checkpoints.save_before_leaving()
            raise
        await self.cancel_ahead()
        await self.checkpoints.save()
        self.require_folder()
        if await self.evaluations.after():
            await self.checkpoints.keep_scores()
        return self.summary()

    def require_folder(self) -> None:
        """Raise EnvironmentLacks where the run's folder was moved, removed or replaced."""
        if lost := self.system.folder.hold():
            raise EnvironmentLacks(lost)

    def out_of_time(self, began: float) -> bool:
        """Whether `trainer.max_minutes` have passed; if so, a line says it."""
        minutes = self.config.trainer.max_minutes
        if not minutes or time.monotonic() - began <= 60 * minutes:
            return False
        self.progress.say(f"trainer.max_minutes={minutes:g} have passed: ending after step {self.step}")
        return True

    def out_of_patience(self) -> bool:
        """Whether `trainer.patience` is at its end; if so, a line says it."""
        if why := self.best.why_to_end(self.config.trainer):
            self.progress.say(f"ending after step {self.step}: {why}")
        return why is not None

    async def until_resumed(self) -> None:
        """Wait while the run is paused. Its workers stay, idle; those that join get their weights."""
        if self.resumed.is_set():
            return
        self.idle = True
        self.progress.stage("paused", self.step)
        try:
            await run_with_resync(self.system.pool, self.resumed.wait(), self.sync)
        finally:
            self.idle = False

    async def after_step(self, action: MonitorAction | None) -> None:
        """Do what is due after a step: roll back, evaluate, save, or end the run as the monitor wants."""
        self.unfinished = None
        rolled_back = False
        if action and action.kind == "rollback" and not action.undo:
            self.checkpointable = False  # cut short in here, learner and driver may stand at different steps
            rolled_back = await roll_back(self, action)
        self.checkpointable = True
        if rolled_back:
            return
        if self.evaluations.due():
            await self.evaluations.run(f"step{self.step}")
        if self.checkpoints.due():
            await self.checkpoints.save()
        if action and action.kind == "stop":
            raise UnspiralError(
                f"stopped by the monitor at step {self.step}: {action.why} (monitor.action=stop)",
                exit_code=STOPPED_BY_MONITOR,
                explained=True,
            )

    # The parts of a step

    async def next_batch(self, step: int) -> RolloutBatch:
        """This step's batch, without trajectories that are older than `rollout.max_staleness` allows."""
        sampling = await self.ahead.take(step)
        self.progress.stage("rollout", step)
        batch = await run_with_resync(self.system.pool, sampling, self.sync)
        return batch.drop_older_than(self.version - self.config.rollout.max_staleness)

    async def cancel_ahead(self) -> None:
        """Sample no further."""
        await self.ahead.cancel()

    async def sync_and_rescore(self, tokens: TrainBatch, moved: bool) -> tuple[Rescored, float, float]:
        """Both, and the seconds of each. On shared GPUs scoring comes first, in the learner's turn."""
        if self.share_gpus:
            rescored, rescore_seconds = await self.rescore(tokens, moved)
            return rescored, await self.sync(), rescore_seconds
        sync_seconds = await self.sync()
        rescored, rescore_seconds = await self.rescore(tokens, moved)
        return rescored, sync_seconds, rescore_seconds

    async def sync(self) -> float:
        """Give the workers the learner's weights, as `version`; before the first rollout too. On shared GPUs
        their turn begins. Returns its seconds."""
        began = time.monotonic()
        system = self.system
        with self.clock.measure("sync"):
            update = await sync_weights(
                system.learner,
                system.pool,
                self.version,
                on_learner=self.on_learner,
                on_event=lambda event: system.folder.event(**event),
                before_sending=self.hand_over if self.share_gpus else None,
            )
        self.sync_bytes = update.nbytes
        self.sync_seconds = time.monotonic() - began
        return self.sync_seconds

    async def hand_over(self) -> None:
        """The GPUs from the learner to the workers."""
        # First: an engine takes back as much memory as it had, or fails.
        await self.on_learner(self.system.learner.free_cached_gpu_memory)
        await self.system.pool.wake()

    async def rescore(self, tokens: TrainBatch, moved: bool) -> tuple[Rescored, float]:
        """Score the batch (or a sample of it; nothing of it where the weights did not move) and the probes
        under the new weights, in one pass of the learner. Returns the pass's seconds too."""
        with self.clock.measure("score"):
            return await self.rescoring.run(tokens, moved)

    async def record(self, result: StepResult) -> MonitorAction | None:
        """Write down a step, and ask the monitor what to do about it."""
        # A large batch takes its time, so metrics and files are made in threads. The trajectories come before
        # the step's line in metrics.jsonl, without which a resumed run forgets them.
        batch = result.batch
        metrics = await asyncio.to_thread(result.metrics)
        self.updates.observe(result.step, metrics)
        metrics |= await asyncio.to_thread(
            self.metrics.of, batch.trajectories, batch.rewards.tolist(), metrics
        )
        held_out = self.held_out(result.step - 1)  # of the weights that this step began with
        metrics |= held_out
        await asyncio.to_thread(
            self.system.folder.trajectories, result.step, batch.trajectories, batch.rewards.tolist()
        )
        state = self.recorder.step(result, metrics, held_out)
        if result.update.idle and (why := self.notices.idle_step(result.step, batch)):
            self.system.folder.event("nothing_learnt", step=result.step, why=why)
        for line in result.update.told:
            self.notices.say(f"step {result.step}: learner: {line}")
            self.system.folder.event("learner_memory", step=result.step, text=line)
        self.notices.rewards(result.step, self.sampler)
        action = self.actions.decide(state)
        if action:
            self.event(action.event())
        return action

    def event(self, event: EventRecord) -> None:
        """Write down what the monitor did."""
        self.recorder.event(event)

    # Attempts

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the checkpoint's step, as the next attempt."""
        self.take_up(state)
        self.begin_attempt()

    def begin_attempt(self) -> None:
        """Number this attempt, and forget what earlier ones left of the steps that come now."""
        folder = self.system.folder
        self.attempt = max(self.attempt, folder.last_attempt()) + 1
        self.probes.restore(self.step)
        self.recorder.begin_attempt()
        folder.cut_after(self.step)
        self.updates.restore(folder.metrics_path, self.step)
        drop_after(folder.path, self.step)
        earlier = round(folder.earlier_seconds, 1)
        folder.event("resume", step=self.step, attempt=self.attempt, earlier_seconds=earlier)
