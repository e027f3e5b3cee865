"""`unspiral eval`: the scores of a checkpoint, or of a model that was never trained, on held-out
questions."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, closing, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from services.common.counting import counted
from services.common.errors import UserError
from services.common.files import write_json, written_aside
from services.common.processes import signals
from services.common.runs.kept_answers import protocol_file
from services.common.scratch import scratch_folder
from services.contracts import Trajectory
from trainer.commands.work.asked_how import asked_how
from trainer.config.schema import Config
from trainer.data import models
from trainer.learner.checkpoint import find
from trainer.learner.export import export_checkpoint
from trainer.learner.model.asked import unlike
from trainer.learner.model.model_identity import weights_digest
from trainer.loop.rollouts.held_out import evaluate, with_behaviour
from trainer.loop.rollouts.scoring import calls_of
from trainer.loop.run.progress import duration
from trainer.loop.run.system import Serving
from trainer.rewards import make_reward, right_at
from trainer.rewards.calls import RewardCalls
from trainer.session.on_ray.watch import RayLost, leave_without_ray, ray_watched
from trainer.session.resuming.rules import differing
from trainer.session.startup import start_serving
from trainer.session.waits import busy, told
from trainer.suite.rows import GREEDY, Asked, row_of
from trainer.suite.sets import Item, numbered

SAY_SECONDS = 15.0
"""Between two lines of progress."""
Scores = TypeVar("Scores")


def run_eval(
    config: Config,
    *,
    checkpoint: str | Path | None = None,
    data: Path | None = None,
    limit: int | None = None,
    answers: Path | None = None,
    on_scores: Callable[[dict[str, Any]], None] = lambda scores: None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """`unspiral eval`: greedy scores of a checkpoint's weights (or of model.path) on `data` (or data.eval):
    all rows, or `limit`.

    answers: file for every answer, one JSON object per question, as `eval --suite` keeps them: question,
    text, searches with their documents, scores. How they were asked is kept beside it.
    on_scores: called with the scores before the system is ended, which takes seconds in which the process
    may be ended itself.

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

    settings = config.reward
    calls = calls_of(reward, settings) if reward else None

    async def score(model: Path, scratch: Path | None = None) -> dict[str, Any]:
        async with served(config, model, scratch, say) as serving:
            say(f"scoring {counted(len(serving.eval_questions), 'question')}")
            answered = Answered(len(serving.eval_questions), say)
            with told(say, lambda: answered.waits_for(calls), lambda: answered.count):
                scores, done = await evaluate(
                    serving.pool,
                    serving.eval_questions,
                    tag="eval",
                    temperature=0.0,
                    seed=config.seed,
                    calls=calls,
                    right_at=right_at(reward, settings.right_at),
                    retriever_url=serving.eval_retriever_url,
                    on_done=answered,
                )
            if answers is not None:
                weights = await asyncio.to_thread(weights_digest, model)
                name = str(found or config.model.path)
                about = await asked_how(
                    config, name, weights, serving.tokenizer, serving.eval_questions, serving
                )
                keep_answers(done, answers, about)
            scores = with_behaviour(scores, done)
            on_scores(scores)
            return scores

    found = None
    if checkpoint is not None:
        with signals.raised():
            found = find(checkpoint, config.run_dir, say)
    with closing(calls) if calls else nullcontext():
        return with_weights(config, found, say, score)


class Answered:
    """Counts answers as they come, and says how many there are: a line in SAY_SECONDS at most."""

    def __init__(
        self, total: int, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.count = 0
        self._total = total
        self._say = say
        self._clock = clock
        self._began = clock()
        self._said = self._began

    def __call__(self, _: Trajectory) -> None:
        self.count += 1
        now = self._clock()
        if self.count < self._total and now - self._said >= SAY_SECONDS:
            self._said = now
            left = (now - self._began) / self.count * (self._total - self.count)
            self._say(f"{self.count:,} of {self._total:,} answered, {duration(left)} left")

    def waits_for(self, calls: RewardCalls | None = None) -> str:
        """For the line that is due where no answer comes. calls: of the reward function."""
        what = "an answer"
        if self.count == self._total:
            what = (calls.waits_for() if calls else "") or "the rewards"
        return f"{what}; {self.count:,} of {self._total:,} answered{busy()}"


def keep_answers(done: Sequence[Trajectory], file: Path, about: dict[str, Any] | None = None) -> None:
    """Write one row per answer, in the order of the questions. Where an id stands again in the question file,
    the key of its row has a number (`7#2`), as in a suite. about: as of `asked_how`, which is written beside
    it, so that `eval compare` can tell what else was different; without it none stays there."""
    keys = numbered([trajectory.question.id for trajectory in done])
    protocol = protocol_file(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(file) as aside, open(aside, "w", encoding="utf-8", errors="replace") as lines:
        for key, trajectory in zip(keys, done, strict=True):
            question = trajectory.question
            asked = Asked(Item(key, question.data_source, question), GREEDY)
            lines.write(json.dumps(row_of(asked, trajectory, None), ensure_ascii=False) + "\n")
        # Before the answers: where the process is killed between the two, that of earlier answers would be
        # taken for theirs.
        protocol.unlink(missing_ok=True)
    if about is not None:
        write_json(protocol, about, indent=1, ensure_ascii=False)


@asynccontextmanager
async def served(
    config: Config, model: Path, scratch: Path | None, say: Callable[[str], None]
) -> AsyncIterator[Serving]:
    """Everything that sampling needs, its workers started. scratch: a folder to remove where Ray dies, which
    ends the process."""

    def ray_has_died(lost: RayLost) -> None:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
        leave_without_ray(lost)

    async with start_serving(config, model, say, lambda event: None) as serving:
        with ray_watched(ray_has_died):
            say("starting rollout workers")
            await serving.pool.start()
            yield serving


def with_weights(
    config: Config,
    checkpoint: str | Path | None,
    say: Callable[[str], None],
    score: Callable[[Path, Path | None], Coroutine[Any, Any, Scores]],
) -> Scores:
    """The result of `score(model, scratch)` on a checkpoint's weights, exported to the folder `scratch`; on
    model.path without one. Raises Stopped after a signal, whenever it comes: the folder is removed then."""

    async def heard(model: Path, scratch: Path | None) -> Scores:
        async with signals.cancelled(say):
            return await score(model, scratch)

    if checkpoint is None:
        with signals.raised():
            model = models.resolve(config.model.path)
        if line := unlike(model, config.rollout, task=True):
            say(line)
        return asyncio.run(heard(model, None))
    with scratch_folder("eval") as folder:
        with signals.raised():
            found = find(checkpoint, config.run_dir, say)
            say(f"weights of {found}")
            for line in differing(found, config):
                say(line)
            export_checkpoint(found, folder / "model")
        return asyncio.run(heard(folder / "model", folder))
