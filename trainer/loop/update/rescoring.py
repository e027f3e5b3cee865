"""The batch and the probes scored again under the new weights."""

from __future__ import annotations

import asyncio

import numpy as np

from services.contracts import TokenBatch, TrainBatch
from trainer.loop.run.progress import Progress
from trainer.loop.run.run_state import RunState
from trainer.loop.update.learner_calls import LearnerCalls
from trainer.loop.update.probes import Probes, Rescored


class Rescoring:
    """Scores the batch (or a sample of it; nothing of it where the weights did not move) and the probes, in
    one pass of the learner."""

    def __init__(self, state: RunState, probes: Probes, progress: Progress, on_learner: LearnerCalls) -> None:
        self.state = state
        self.system = state.system
        self.probes = probes
        self.progress = progress
        self.on_learner = on_learner

    async def run(self, tokens: TrainBatch, moved: bool) -> tuple[Rescored, float]:
        """The new log-probs, and the seconds of the pass."""
        step = self.state.step
        missing_before = self.probes.missing
        parts = await asyncio.to_thread(self.probes.parts, step, tokens, moved=moved)
        if missing := self.probes.missing:
            self.system.folder.event("probe_missing", step=step, probe="lag", reason=missing)
            if not missing_before:
                self.progress.say(f"step {step}: no lag probe: {missing}")
        if not parts:
            return self.probes.read(tokens, parts, np.zeros(0, np.float32)), 0.0
        asked = TokenBatch.joined(list(parts.values()))
        scores, seconds = await self.on_learner(self.system.learner.score, asked)
        return self.probes.read(tokens, parts, scores.logp), seconds
