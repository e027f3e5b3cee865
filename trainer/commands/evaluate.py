"""`unspiral eval`: the scores of a checkpoint, or of a model that was never trained, on held-out
questions."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.common import signals
from services.common.errors import UserError
from trainer.config.schema import Config
from trainer.data import models
from trainer.learner.checkpoint import export_checkpoint, find
from trainer.loop.held_out import evaluate
from trainer.rewards import make_reward, right_at
from trainer.session.ray_watch import RayLost, leave_without_ray, ray_watched
from trainer.session.resume_rules import differing
from trainer.session.startup import start_serving


def run_eval(
    config: Config,
    *,
    checkpoint: str | Path | None = None,
    data: Path | None = None,
    limit: int | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """`unspiral eval`: greedy scores of a checkpoint's weights (or of model.path) on `data` (or data.eval):
    all rows, or `limit`.

    Raises Stopped after a clean stop by SIGINT, SIGTERM or SIGHUP.
    """
    asked = config.data.model_copy(update={"eval": str(data) if data else config.data.eval})
    evaluation = config.evaluation.model_copy(update={"limit": limit})
    config = config.model_copy(update={"data": asked, "evaluation": evaluation})
    if config.data.eval is None:
        raise UserError("eval: no questions given; pass --data FILE or set data.eval")

    try:
        reward = make_reward(config.reward.kind)
    except UserError as e:  # exact match and F1 need none
        say(f"{e}; what it calls right is left out")
        reward = None

    async def score(model: Path, scratch: Path | None = None) -> dict[str, Any]:
        def ray_has_died(lost: RayLost) -> None:
            if scratch is not None:
                shutil.rmtree(scratch, ignore_errors=True)
            leave_without_ray(lost)

        async with (
            signals.cancelled(say),
            start_serving(config, model, say, lambda event: None) as serving,
        ):
            with ray_watched(ray_has_died):
                say("starting rollout workers")
                await serving.pool.start()
                say(f"scoring {len(serving.eval_questions)} questions")
                scores, _ = await evaluate(
                    serving.pool,
                    serving.eval_questions,
                    tag="eval",
                    temperature=0.0,
                    seed=config.seed,
                    reward=reward,
                    right_at=right_at(reward, config.reward.right_at),
                    retriever_url=serving.eval_retriever_url,
                )
                return scores

    if checkpoint is None:
        return asyncio.run(score(models.resolve(config.model.path)))
    with tempfile.TemporaryDirectory(prefix="unspiral-eval-") as folder:
        with signals.raised():
            found = find(checkpoint, config.run_dir)
            say(f"weights of {found}")
            for line in differing(found, config):
                say(line)
            export_checkpoint(found, Path(folder) / "model")
        return asyncio.run(score(Path(folder) / "model", scratch=Path(folder)))
