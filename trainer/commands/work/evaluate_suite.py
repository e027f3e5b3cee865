"""`unspiral eval --suite`: a method's answers to the seven sets, and the table of their scores."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from retriever_service.client import Hit, RetrieverClient
from services.common.errors import UserError
from services.common.names import accepted
from services.common.processes import signals
from services.rollout.worker.tokenizer import load_tokenizer
from trainer.commands.work.asked_how import asked_how
from trainer.commands.work.evaluate import served, with_weights
from trainer.config.schema import Config
from trainer.data import models
from trainer.data.checkpoints import asked_otherwise
from trainer.data.named_columns import named_in
from trainer.learner.checkpoint import find
from trainer.learner.model.model_identity import weights_digest
from trainer.loop.run.system import Serving
from trainer.session.preflight.prompts import check_prompts
from trainer.session.waits import told
from trainer.suite.answering import Asking, Retrieve, Sampling
from trainer.suite.folder import begin, finish
from trainer.suite.methods import Method, method_of
from trainer.suite.result import result_of
from trainer.suite.rows import AnswersFile, planned
from trainer.suite.sets import SUITES, TITLES, Suite, read_suite


@dataclass(frozen=True)
class SuiteOptions:
    """What the command line asks for."""

    suite: str
    method: str = "agent"
    data: Path | None = None
    split: str = "auto"
    limit_per_source: int | None = None
    samples: int = 0
    checkpoint: str | None = None
    out: Path | None = None

    def folder(self, config: Config) -> Path:
        """The folder of the answers."""
        return self.out or config.run_dir / "eval" / f"{self.suite}-{self.method}"


def run_suite(config: Config, options: SuiteOptions, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Answer what is not answered in the folder yet, write its result and tables, and return the result.

    Raises UserError before anything slow starts, and Stopped after a signal; what was answered by then
    stays, and the same command goes on.
    """
    if options.suite not in SUITES:
        raise UserError(f"--suite {options.suite}: {accepted(options.suite, SUITES)}")
    method = method_of(options.method, config.rollout)
    data = str(options.data) if options.data else config.data.eval
    if data is None:
        raise UserError("eval: no questions given; pass --data FOLDER or set data.eval")
    suite = read_suite(
        models.resolve_file(data),
        split=options.split,
        limit=options.limit_per_source,
        seed=config.seed,
        skip_bad=config.data.skip_bad,
        keys=named_in(config.data),
        say=say,
    )
    _tell(suite, say)
    if method.name == "agent" and options.checkpoint is None:
        for difference in asked_otherwise(config.model.path, config.rollout):
            say(f"warning: {config.model.path}: {difference} (unspiral model list)")
    config = config.model_copy(
        update={
            "rollout": method.settings(config.rollout),
            "data": config.data.model_copy(update={"eval": None}),
        }
    )

    if options.checkpoint is not None:
        # `latest` is the name of other weights tomorrow, and no name for a table.
        with signals.raised():
            found = find(options.checkpoint, config.run_dir, say)
            options = replace(options, checkpoint=str(found))

    async def score(model: Path, scratch: Path | None) -> dict[str, Any]:
        return await _scored(config, options, method, suite, model, scratch, say)

    return with_weights(config, options.checkpoint, say, score)


def _tell(suite: Suite, say: Callable[[str], None]) -> None:
    """The rows that count, those that do not, and the sets that are missing."""
    for one in suite.sets:
        about = one.describe()
        say(f"{TITLES[one.name]}: {about['split']}, {about['subset']}, {about['n']:,} questions")
    for name, count in suite.repeated.items():
        say(f"{TITLES[name]}: {count:,} questions stand there again, and count each time")
    for name, count in suite.left_out.most_common():
        say(f"left out: {count:,} questions of {name}, none of the seven sets; without --suite they count")
    if suite.missing:
        names = ", ".join(TITLES[name] for name in suite.missing)
        say(f"no questions of {names}: averages that need them will be absent")


async def _scored(
    config: Config,
    options: SuiteOptions,
    method: Method,
    suite: Suite,
    model: Path,
    scratch: Path | None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    questions = [item.question for item in suite.items]
    tokenizer = await asyncio.to_thread(load_tokenizer, model)
    await asyncio.to_thread(check_prompts, "--suite", questions, tokenizer, config.rollout)
    weights = await asyncio.to_thread(weights_digest, model)
    folder = options.folder(config)
    async with served(config, model, scratch, say) as serving, AsyncExitStack() as stack:
        name = str(options.checkpoint or config.model.path)
        about = {"suite": options.suite}
        about |= await asked_how(config, name, weights, tokenizer, questions, serving, method)
        begin(folder, about, say)
        plan = planned(suite.items, options.samples)
        with AnswersFile(folder, plan) as answers:
            asking = Asking(
                serving.pool,
                answers,
                plan,
                Sampling(
                    config.seed,
                    config.rollout.temperature,
                    config.rollout.deterministic,
                    serving.eval_retriever_url,
                    method.untagged,
                ),
                await _retrieval(config, serving, stack) if method.retrieves else None,
                say,
            )
            say(f"{len(plan):,} answers, to {answers.path}")
            with told(say, serving.pool.waits_for, lambda: asking.done):
                await asking.run()
            result = await asyncio.to_thread(result_of, suite, answers.rows(plan), options.samples, about)
    finish(folder, result)
    return result


async def _retrieval(config: Config, serving: Serving, stack: AsyncExitStack) -> Retrieve:
    """One search for a question, by a client that is closed with the stack."""
    settings = config.evaluation.retriever or config.retriever
    client = RetrieverClient(
        serving.eval_retriever_url or serving.retriever_url, timeout_seconds=settings.timeout_seconds
    )
    stack.push_async_callback(client.aclose)

    async def retrieve(query: str) -> list[Hit]:
        return (await client.retrieve([query], config.rollout.topk))[0]

    return retrieve
