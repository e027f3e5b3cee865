"""A run's evaluations on held-out questions: when one is due, what it asks, and where its scores go."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from services.likelihood.evaluations import evaluation_event
from services.likelihood.records import EventRecord
from trainer.loop.rollouts.held_out import evaluate
from trainer.loop.rollouts.sampling import BatchSampler
from trainer.loop.run import sources
from trainer.loop.run.progress import Progress
from trainer.loop.run.run_state import RunState
from trainer.loop.run.spans import StepClock
from trainer.loop.run.system import StopRequests
from trainer.loop.update.sync import run_with_resync


class Evaluations:
    """Asks the held-out questions before, after and within a run. Scores go to `RunState.scores`, the best
    greedy one to `RunState.best`."""

    def __init__(
        self,
        state: RunState,
        sampler: BatchSampler,
        progress: Progress,
        stop: StopRequests,
        clock: StepClock,
        sync: Callable[[], Awaitable[Any]],
        post: Callable[[EventRecord], None],
    ) -> None:
        """sync: sends the weights in force to the workers, for those that join in mid-evaluation. post: takes
        the event of each evaluation."""
        self.state = state
        self.system = state.system
        self.config = state.config
        self.sampler = sampler
        self.progress = progress
        self.stop = stop
        self.clock = clock
        self.sync = sync
        self.post = post

    def due(self) -> bool:
        """Whether held-out questions are asked after this step; the last one has an evaluation anyway."""
        settings = self.config.trainer
        step = self.state.step
        due = bool(settings.eval_every) and step % settings.eval_every == 0
        return due and step < settings.steps and not self.stop.requested

    async def before(self) -> None:
        """The scores of the weights that the run begins with, once for all its attempts."""
        settings = self.config.trainer
        if settings.eval_at_ends and self.state.step == 0 and "before/greedy" not in self.state.scores:
            await self.run("before")

    async def left_out(self) -> None:
        """The scores of the step that the run goes on from, where they were due and a signal came first."""
        step = self.state.step
        if step and self.due() and step not in (self.state.best.at, self.state.best.asked):
            await self.run(f"step{step}")

    async def after(self) -> bool:
        """The scores of the last weights, unless the run was asked to stop. Whether there are any."""
        if not self.config.trainer.eval_at_ends or self.stop.requested:
            return False
        await self.run("after")
        return self.state.best.asked == self.state.step

    async def run(self, tag: str) -> None:
        """Held-out scores, greedy and (if asked for) sampled; logged as events, kept for the summary."""
        modes = ("greedy", "sampled") if self.config.evaluation.sampled else ("greedy",)
        for mode in modes if self.system.eval_questions else ():
            await self._run(tag, mode)

    async def _run(self, tag: str, mode: str) -> None:
        step = self.state.step
        self.progress.stage(f"evaluation, {mode}", step)
        evaluation = evaluate(
            self.system.pool,
            self.system.eval_questions,
            tag=f"{tag}-{mode}",
            temperature=0.0 if mode == "greedy" else self.config.rollout.temperature,
            seed=self.config.seed,
            calls=self.sampler.calls,
            right_at=self.sampler.right_at,
            retriever_url=self.system.eval_retriever_url,
        )
        with self.clock.measure(f"evaluate, {mode}"):
            scores, trajectories = await run_with_resync(self.system.pool, evaluation, self.sync)
        by_source = {"em_by_source": sources.em_of(scores["sources"])}
        kept = scores["overall"] | by_source
        self.state.keep_scores(tag, mode, kept)
        if mode == "greedy":
            self.state.best.take(step, sources.compared(kept, self.config.trainer.best_by))
        exact = [self.sampler.exact(t) for t in trajectories]
        self.system.folder.trajectories(f"eval_{tag}_{mode}", trajectories, exact)
        self.system.folder.event("evaluation", step=step, tag=tag, mode=mode, **by_source, **scores)
        # At once: the line of the next step repeats the scores, and after the last step there is none.
        metrics = sources.score_metrics(kept, mode)
        self.post(evaluation_event(step, self.state.attempt, tag, mode, scores["overall"], metrics))
        self.progress.evaluation(tag, mode, scores)
