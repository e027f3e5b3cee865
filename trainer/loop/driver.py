"""The training loop.

One step, as data flows:

    prompts ─> pool of rollout workers ─> trajectories ─> rewards ─> advantages
                     ^                                                  │
       weights v+1   │                                                  v
    sync <── learner: pi_old, then several optimiser steps of GRPO + lambda * LLDS ──> batch and probes scored again
                                                                        │
                       metrics.jsonl, likelihood store, phase monitor <─┘
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from services.contracts import TokenBatch
from services.likelihood.metrics.step_metrics import step_metrics, trajectory_records
from services.likelihood.monitor.actions import MonitorAction, MonitorActions
from services.likelihood.monitor.phases import PhaseMonitor, PhaseState
from services.likelihood.records import EventRecord, StepRecord
from trainer.algorithms import answer_beta
from trainer.learner.checkpoint import CheckpointNotWritten, drop_after, fault, prune, step_folder
from trainer.learner.group import LearnerError
from trainer.loop import performance
from trainer.loop.batches import Prepared, prepare
from trainer.loop.evaluate import evaluate
from trainer.loop.notices import Notices
from trainer.loop.probes import Probes, Rescored
from trainer.loop.progress import Progress
from trainer.loop.restore import restore_learner, roll_back
from trainer.loop.run_folder import finite_or_none
from trainer.loop.sampling import BatchSampler, RolloutBatch
from trainer.loop.sync import kept_supplied, sync_weights
from trainer.loop.system import StoppedByMonitor, StopRequests, System

KEEP_SECONDS = 5.0
"""Longest wait for the store before a checkpoint; then what it was not given yet is put on the disk."""


class Driver:
    """Runs the loop over a started system. What a checkpoint must hold beside the learner's own state is in `state_dict`."""

    def __init__(self, system: System, progress: Progress, stop: StopRequests) -> None:
        self.system, self.config, self.progress, self.stop = system, system.config, progress, stop
        self.sampler = BatchSampler(self.config, system.pool, system.cursor, system.reward)
        self.probes = Probes(self.config.probe, system.store, self.config.run.name, system.folder.path)
        self.monitor = PhaseMonitor(self.config.monitor.rules)
        self.actions = MonitorActions(self.config.monitor.action)
        self.notices = Notices(progress.say)
        self.share_gpus = self.config.rollout.share_gpus
        self.step = self.attempt = 0
        self.version = 0
        """Of the learner's weights: one more after each step and after a rollback, since the workers take no lower one."""
        self.whole = True
        """Whether learner, cursor, monitor and files stand at the end of the same step, which a checkpoint may then hold.

        So they do while the next step is being sampled."""
        self.unfinished: int | None = None
        """The step whose update has begun, until it is recorded."""
        self.cursor_state: dict[str, Any] = system.cursor.state_dict()
        self.scores: dict[str, Any] = {}
        self.sync_bytes = 0
        """Size of the last version sent."""
        self.sync_seconds: float | None = None
        """Of the last sync."""
        self.rewards: deque[float | None] = deque(maxlen=10)
        """Mean reward of the last steps."""
        self.restores = 0
        """Times that the learner was lost and restored."""
        self.resumed = asyncio.Event()
        """Not set: the control plane has asked that no further step begins."""
        self.resumed.set()
        self.idle = False
        """Whether the run is paused, with no step in hand."""
        self.learner_call: str | None = None
        self.learner_calls = 0
        """The call that is being made, and how many have returned."""
        self.first_state = copy.deepcopy(self.state_dict())
        """Before any step and checkpoint."""
        self.base: Path | None = None
        self.base_step = 0
        """The checkpoint from which this process went on, and its step."""
        self.learner_ranks = list(system.learner.where)
        self._ahead: deque[asyncio.Task[RolloutBatch]] = deque()

    async def run(self) -> dict[str, Any]:
        """All steps from where the run stands, with a learner that is lost restored. Returns the summary."""
        began = time.monotonic()
        while True:
            try:
                return await self.all_steps(began)
            except LearnerError as error:
                await restore_learner(self, error)

    async def all_steps(self, began: float) -> dict[str, Any]:
        """The same, up to the first LearnerError. began: time (monotonic) from which `trainer.max_minutes` are counted."""
        settings = self.config.trainer
        await self.sync()
        if settings.eval_at_ends and self.step == 0 and "before/greedy" not in self.scores:
            await self.evaluate("before")
        try:
            while self.step < settings.steps and not self.stop.requested:
                await self.until_resumed()
                if settings.max_minutes and time.monotonic() - began > 60 * settings.max_minutes:
                    self.progress.say(
                        f"trainer.max_minutes={settings.max_minutes:g} have passed: ending after step {self.step}"
                    )
                    break
                with self.stop.step_in_hand():
                    await self.advance(self.step + 1)
        except (LearnerError, CheckpointNotWritten):
            self.whole = False  # nothing can be saved, and trying would hide the cause
            await self.cancel_ahead()
            raise
        except BaseException:
            await self.cancel_ahead()
            await self.save_before_leaving()
            raise
        await self.cancel_ahead()
        await self.checkpoint()
        if settings.eval_at_ends and not self.stop.requested:
            await self.evaluate("after")
        return self.summary()

    async def save_before_leaving(self) -> None:
        """Save the last whole step of a run that is cut short, if the learner still has its weights. What cannot be saved is said."""
        if not self.whole:
            return
        self.progress.say(f"saving step {self.step}")
        try:
            await self.checkpoint()
        except (LearnerError, CheckpointNotWritten) as error:
            self.progress.say(f"step {self.step} was not saved: {error}")

    async def until_resumed(self) -> None:
        """Return at once, but for a paused run. Its workers stay, idle; those that join get their weights."""
        if self.resumed.is_set():
            return
        self.idle = True
        self.progress.stage("paused", self.step)
        try:
            await kept_supplied(self.system.pool, self.resumed.wait(), self.sync)
        finally:
            self.idle = False

    async def advance(self, step: int) -> None:
        """One step, then what is due after it. Cut short in an update or a rollback, the run is not whole."""
        settings = self.config.trainer
        action = await self.one_step(step)
        self.unfinished = None
        rolled_back = False
        if action and action.kind == "rollback" and not action.undo:
            self.whole = False
            rolled_back = await roll_back(self, action)
        self.whole = True
        if rolled_back:
            return
        if (
            settings.eval_every
            and step % settings.eval_every == 0
            and step < settings.steps
            and not self.stop.requested
        ):
            await self.evaluate(f"step{step}")
        if settings.checkpoint_every and step % settings.checkpoint_every == 0:
            await self.checkpoint()
        if action and action.kind == "stop":
            raise StoppedByMonitor(
                f"stopped by the monitor at step {step}: {action.why} (monitor.action=stop)"
            )

    async def one_step(self, step: int) -> MonitorAction | None:
        """Sample, update, sync, measure. Returns what the monitor wants done; a changed lambda or learning rate holds from the next step on."""
        began, llds = time.monotonic(), self.config.algorithm.llds
        llds_lambda = self.actions.lambda_of(llds.lambda_)
        self.probes.ask(step)
        batch = await self.next_batch(step)
        waited = time.monotonic() - began
        if self.share_gpus:
            await self.system.pool.sleep()
        prepared = await asyncio.to_thread(prepare, batch, self.config, self.system.tokenizer)
        self.whole = False
        self.unfinished = step
        update, update_seconds = await self.on_learner(
            self.system.learner.update,
            prepared.tokens,
            llds_lambda=llds_lambda,
            lr_scale=self.actions.lr_scale,
            answer_beta=answer_beta(
                llds.answer_weight,
                float(np.mean([t.searches for t in batch.trajectories] or [0])),
                llds_lambda=llds_lambda,
                answer_lambda=llds.answer_lambda,
            ),
        )
        prepared.tokens.logp_old = update.logp_old
        self.step, self.version, self.cursor_state = step, self.version + 1, batch.cursor
        if self.share_gpus:  # while it is still the learner's turn
            rescored, score_seconds = await self.rescore(prepared, update.moved)
            sync_seconds = await self.sync()
        else:
            sync_seconds = await self.sync()
            rescored, score_seconds = await self.rescore(prepared, update.moved)
        measured = await asyncio.to_thread(self.measure, batch, prepared, update, rescored)
        metrics = measured | {
            "llds/lambda": llds_lambda,
            "learner/lr_scale": self.actions.lr_scale,
            "sync/bytes": float(self.sync_bytes),
            "time/rollout": batch.seconds,
            "time/rollout_wait": waited,
            "time/update": update_seconds,
            "time/sync": sync_seconds,
            "time/logprob": score_seconds,
            "time/step": time.monotonic() - began,
        }
        # Large batches take their time. They come before the step's line in metrics.jsonl, without which a resumed run forgets them.
        await asyncio.to_thread(
            self.system.folder.trajectories, step, batch.trajectories, batch.rewards.tolist()
        )
        state = self.record(batch, prepared, metrics, rescored)
        if update.idle and (why := self.notices.idle_step(step, batch)):
            self.system.folder.event("nothing_learnt", step=step, why=why)
        self.notices.rewards(step, self.sampler)
        action = self.actions.decide(state)
        if action:
            self.event(action.event())
        return action

    def event(self, event: EventRecord) -> None:
        """Something that the monitor did: into the run's folder, the store and the terminal."""
        self.system.folder.event(
            event.kind,
            step=event.step,
            text=event.text,
            **{k: v for k, v in event.data.items() if k != "step"},
        )
        self.system.store.post_event(self.config.run.name, event)
        self.progress.say(f"step {event.step}: {event.kind.replace('_', ' ')}: {event.text}")

    async def next_batch(self, step: int) -> RolloutBatch:
        """This step's batch. With max_staleness k, the k batches after it are being sampled while the learner updates."""
        while len(self._ahead) <= min(self.config.rollout.max_staleness, self.config.trainer.steps - step):
            self._ahead.append(
                asyncio.create_task(self.sampler.sample(step + len(self._ahead), self.progress.trajectory))
            )
            await asyncio.sleep(0)  # batches take their prompts in order
        self.progress.stage("rollout", step)
        batch = await kept_supplied(self.system.pool, self._ahead.popleft(), self.sync)
        return batch.drop_older_than(self.version - self.config.rollout.max_staleness)

    async def cancel_ahead(self) -> None:
        for task in self._ahead:
            task.cancel()
        await asyncio.gather(*self._ahead, return_exceptions=True)
        self._ahead.clear()

    async def on_learner(self, call: Any, *args: Any, **kwargs: Any) -> tuple[Any, float]:
        """A learner's call in a thread, so that rollouts go on; its result and its seconds."""
        self.learner_call = call.__name__.replace("_", " ")
        self.progress.stage(self.learner_call, self.step)
        began = time.monotonic()
        try:
            return await asyncio.to_thread(call, *args, **kwargs), time.monotonic() - began
        finally:
            self.learner_call, self.learner_calls = None, self.learner_calls + 1

    async def sync(self) -> float:
        """Give the workers the learner's weights, as `version`; before the first rollout too. With shared GPUs their turn begins. Seconds."""
        began = time.monotonic()
        system = self.system
        update = await sync_weights(
            system.learner,
            system.pool,
            self.version,
            on_learner=self.on_learner,
            on_event=lambda event: system.folder.event(**event),
            before_sending=self.hand_over if self.share_gpus else None,
        )
        self.sync_bytes, self.sync_seconds = update.nbytes, time.monotonic() - began
        return self.sync_seconds

    async def hand_over(self) -> None:
        """The GPUs from the learner to the workers."""
        await self.on_learner(self.system.learner.free_cached_gpu_memory)
        await self.system.pool.wake()

    async def rescore(self, prepared: Prepared, moved: bool) -> tuple[Rescored, float]:
        """Score the batch (or a sample of it; nothing of it where the weights did not move) and the probes
        under the new weights, in one pass of the learner."""
        missing_before = self.probes.missing
        parts = await asyncio.to_thread(self.probes.parts, self.step, prepared.tokens, moved=moved)
        if missing := self.probes.missing:
            self.system.folder.event("probe_missing", step=self.step, probe="lag", reason=missing)
            if not missing_before:
                self.progress.say(f"step {self.step}: no lag probe: {missing}")
        logp, seconds = np.zeros(0, np.float32), 0.0
        if parts:
            scored, seconds = await self.on_learner(
                self.system.learner.score, TokenBatch.joined(list(parts.values()))
            )
            logp = scored.logp
        return self.probes.read(prepared.tokens, parts, logp), seconds

    def measure(
        self, batch: RolloutBatch, prepared: Prepared, update: Any, rescored: Rescored
    ) -> dict[str, Any]:
        """All metrics of the step but its times and its phase."""
        likelihood = step_metrics(
            prepared.tokens,
            update.logp_old,
            batch.rewards.tolist(),
            prepared.advantages,
            batch.trajectories,
            right=prepared.right,
            entropy=update.entropy_old,
            logp_new=rescored.logp_new if rescored.rows else None,
            rescored=rescored.rows,
            rollout_seconds=batch.seconds,
        )
        own = {
            "step": self.step,
            "attempt": self.attempt,
            "policy_version": self.version,
        }
        if len(batch.em):
            own["reward/em"] = float(batch.em.mean())
        if known := [right for right in prepared.right if right is not None]:
            own["reward/right"] = sum(known) / len(known)
        return own | likelihood | update.metrics | rescored.metrics | batch.counts

    def record(
        self, batch: RolloutBatch, prepared: Prepared, metrics: dict[str, Any], rescored: Rescored
    ) -> PhaseState:
        """Name the phase, write the run's files, and give the store its copy, which it takes in the background."""
        folder, store, run = self.system.folder, self.system.store, self.config.run.name
        numbers = {k: v for k, v in metrics.items() if isinstance(v, int | float)}
        state = self.monitor.update(numbers)
        metrics["phase"] = state.phase
        for alarm in state.alarms:
            folder.event("alarm", at_step=self.step, **alarm.as_dict())
        self.rewards.append(finite_or_none(metrics.get("reward/mean")))
        folder.metrics(metrics)
        records = trajectory_records(
            batch.trajectories,
            prepared.tokens,
            prepared.tokens.logp_old,
            batch.rewards.tolist(),
            prepared.advantages,
            rescored.logp_new if rescored.rows else None,
            rescored.rows,
            right=prepared.right,
        )
        store.post_step(
            run,
            StepRecord.model_construct(
                step=self.step,
                attempt=self.attempt,
                policy_version=self.version - 1,
                metrics=numbers,
                trajectories=records,
            ),
        )
        store.put_tokens(run, self.step, prepared.tokens, self.attempt)
        self.progress.step(metrics, state.alarms)
        return state

    async def evaluate(self, tag: str) -> None:
        """Held-out scores, greedy and (if asked for) sampled; logged as events, kept for the summary."""
        modes = ("greedy", "sampled") if self.config.evaluation.sampled else ("greedy",)
        for mode in modes if self.system.eval_questions else ():
            self.progress.stage(f"evaluation, {mode}", self.step)
            evaluation = evaluate(
                self.system.pool,
                self.system.eval_questions,
                tag=f"{tag}-{mode}",
                temperature=0.0 if mode == "greedy" else self.config.rollout.temperature,
                seed=self.config.seed,
                reward=self.sampler.reward,
                least=self.sampler.right_at,
                retriever_url=self.system.eval_retriever_url,
            )
            scores, trajectories = await kept_supplied(self.system.pool, evaluation, self.sync)
            self.scores[f"{tag}/{mode}"] = scores["overall"]
            exact = [self.sampler.exact(t) for t in trajectories]
            self.system.folder.trajectories(f"eval_{tag}_{mode}", trajectories, exact)
            self.system.folder.event("evaluation", step=self.step, tag=tag, mode=mode, **scores)
            self.progress.evaluation(tag, mode, scores)

    async def checkpoint(self) -> None:
        """Save everything that a resumed run needs, then prune older ones. Nothing to do where this step is saved already, and whole."""
        folder = self.system.folder.path
        target = step_folder(folder, self.step)
        if self.step == 0 or (target.exists() and await asyncio.to_thread(fault, target) is None):
            return
        with self.stop.saving():
            await asyncio.to_thread(
                self.system.store.keep, 60.0
            )  # the steps before a checkpoint are not taken again
            await self.on_learner(self.system.learner.save, target, self.state_dict())
            await asyncio.to_thread(
                prune, folder, self.config.trainer.keep_checkpoints
            )  # gigabytes are deleted
            self.system.folder.event("checkpoint", step=self.step, path=str(target.relative_to(folder)))

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "attempt": self.attempt,
            "version": self.version,
            "cursor": self.cursor_state,
            "monitor": self.monitor.state_dict(),
            "actions": self.actions.state_dict(),
            "scores": self.scores,
            "identity": self.system.identity,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the checkpoint's step, as the next attempt."""
        self.step, self.scores, self.attempt = state["step"], state["scores"], state["attempt"]
        self.version = max(self.version, state["version"])
        self.cursor_state = state["cursor"]
        self.system.cursor.load_state_dict(self.cursor_state)
        self.monitor.load_state_dict(state["monitor"])
        self.actions.load_state_dict(state["actions"])
        self.begin_attempt()

    def begin_attempt(self) -> None:
        """Number this attempt, and forget what earlier ones left of the steps that come now."""
        folder = self.system.folder
        self.attempt = max(self.attempt, folder.last_attempt()) + 1
        self.probes.restore(self.step)
        folder.cut_after(self.step)
        drop_after(folder.path, self.step)
        folder.event("resume", step=self.step, attempt=self.attempt)

    def summary(self) -> dict[str, Any]:
        """What `summary.json` holds, but seconds and exit status."""
        out: dict[str, Any] = {"steps": self.step, "phase": self.monitor.phase}
        for when in ("before", "after"):
            for mode, suffix in (("greedy", ""), ("sampled", "_sampled")):
                if f"{when}/{mode}" in self.scores:
                    out[f"em_{when}{suffix}"] = self.scores[f"{when}/{mode}"]["em"]
        if numbers := performance.of_run(self.system.folder.metrics_path, self.learner_ranks):
            out["performance"] = numbers
        return out
