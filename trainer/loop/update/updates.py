"""The learner's update of a step, with what the loop adds to it: the step size of another run, and
demonstrations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.algorithms import answer_beta
from trainer.learner.results import UpdateResult
from trainer.loop.run.system import System
from trainer.loop.update.batches import Prepared
from trainer.loop.update.learner_calls import LearnerCalls
from trainer.loop.update.matched_step import SCALE, MatchedStep, read_series
from trainer.loop.update.supervision import Supervision


class Updates:
    """Runs the optimiser steps of each step of the run."""

    def __init__(self, system: System, on_learner: LearnerCalls) -> None:
        """Raises UserError where the other run or the demonstrations cannot be read."""
        config = system.config
        self.config = config
        self.system = system
        self.on_learner = on_learner
        followed = config.learner.match_kl
        self.matched = MatchedStep(read_series(followed)) if followed else None
        taught = config.algorithm.supervised.every
        self.supervision = Supervision(config, system.tokenizer) if taught else None

    async def run(
        self, step: int, prepared: Prepared, mean_searches: float, llds_lambda: float, lr_scale: float
    ) -> tuple[UpdateResult, float]:
        """The update of `step`, and its seconds. `prepared.tokens` has its `logp_old` afterwards."""
        llds = self.config.algorithm.llds
        beta = answer_beta(
            llds.answer_weight, mean_searches, llds_lambda=llds_lambda, answer_lambda=llds.answer_lambda
        )
        scale = self.matched.scale(step) if self.matched else 1.0
        demonstrations = self.supervision.batches(step) if self.supervision else []
        update, seconds = await self.on_learner(
            self.system.learner.update,
            prepared.tokens,
            llds_lambda=llds_lambda,
            lr_scale=lr_scale * scale,
            answer_beta=beta,
            **({"supervised": demonstrations} if demonstrations else {}),
        )
        if self.matched:
            update.metrics[SCALE] = scale
        # The learner's, not the sampler's: later scores are compared with these, and both then come from the
        # same kernels.
        prepared.tokens.logp_old = update.logp_old
        return update, seconds

    def observe(self, step: int, metrics: dict[str, Any]) -> None:
        """Take note of what a step's update did to the policy."""
        if self.matched:
            self.matched.observe(step, metrics[SCALE], metrics.get("kl/old"))

    def restore(self, metrics: Path, step: int) -> None:
        """Stand where this run's own steps up to `step`, by its metrics.jsonl, have led."""
        if self.matched:
            self.matched.restore(metrics, step)
