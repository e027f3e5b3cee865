"""The parts of a run, started in order and ended in reverse: data, model, Ray, services, workers, learner.

Mistakes of the user are looked for first, before anything slow starts.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray

from services.common.counting import left_out
from services.common.errors import EnvironmentLacks
from services.contracts import Question
from services.rollout.pool import placement
from services.rollout.pool.pool import RolloutPool
from services.rollout.worker.tokenizer import load_tokenizer
from services.settings import RolloutSettings
from trainer.config.schema import Config
from trainer.data import PromptCursor
from trainer.data.named_columns import questions_in
from trainer.learner.group import LearnerGroup
from trainer.loop.run.run_folder import RunFolder
from trainer.loop.run.system import Serving, System
from trainer.session.on_ray.start import connect_ray, leave_ray
from trainer.session.own_parts import OwnParts
from trainer.session.preflight.held_out import check_held_out
from trainer.session.preflight.named_files import check_learner_files
from trainer.session.preflight.prompts import check_prompts
from trainer.session.preflight.retrievers import check_addresses, check_retrievers
from trainer.session.preflight.room import check_room
from trainer.session.preflight.stores import check_store
from trainer.session.resuming.rules import Resumed
from trainer.session.run_services import Services, start_services
from trainer.session.waits import busy, told

Say = Callable[[str], None]
LOCAL_SECONDS = 2.0
"""Longest wait for a local Ray to report its resources; no other node joins it."""


def questions_of(config: Config, file: str, say: Say) -> list[Question]:
    """The questions of a file; says how many malformed rows were left out."""
    loaded = questions_in(config.data, file)
    for line in left_out(loaded.skipped, "malformed (data.skip_bad)", loaded.reasons):
        say(line)
    return loaded.rows


def held_out_of(config: Config, tokenizer: Any, say: Say) -> list[Question]:
    """The questions of data.eval, as many as evaluation.limit. Raises where a prompt is too long."""
    if config.data.eval is None:
        return []
    held_out = questions_of(config, config.data.eval, say)[: config.evaluation.limit]
    check_prompts("data.eval", held_out, tokenizer, config.rollout)
    return held_out


@asynccontextmanager
async def start_serving(
    config: Config, model: Path, say: Say, on_event: Callable[[dict[str, Any]], None]
) -> AsyncIterator[Serving]:
    """Ray, retrievers and the pool's plan. The caller starts the pool; on leaving, all of it is ended."""
    tokenizer = load_tokenizer(model)
    await asyncio.to_thread(check_retrievers, config)
    held_out = await asyncio.to_thread(held_out_of, config, tokenizer, say)
    await asyncio.to_thread(check_addresses, config)
    async with AsyncExitStack() as stack:
        connect_ray(say)
        stack.callback(leave_ray)
        placement.check_gpus(config.rollout, 0, ray.cluster_resources())
        services = await start_services(config, stack, say)
        pool = _pool(config, model, services, on_event, learner_ranks=0)
        stack.push_async_callback(pool.close)
        yield Serving(tokenizer, held_out, services.retriever_url, services.eval_retriever_url, pool)


def _pool(
    config: Config,
    model: Path,
    services: Services,
    on_event: Callable[[dict[str, Any]], None],
    *,
    learner_ranks: int,
) -> RolloutPool:
    return RolloutPool(
        config.rollout,
        model_path=str(model),
        retriever_url=services.retriever_url,
        retriever_timeout_seconds=config.retriever.timeout_seconds,
        sync=config.weight_sync,
        on_event=on_event,
        learner_gpus=0 if config.rollout.share_gpus else learner_ranks,
    )


async def wait_for_room(config: Config, learner: LearnerGroup) -> None:
    """Return once the cluster could hold all workers and ranks; nodes may still be joining one that was there
    before this run.

    Raises EnvironmentLacks with demand and supply after SCHEDULE_SECONDS (LOCAL_SECONDS in our own local
    Ray), LearnerError.
    """
    workers = config.rollout.workers
    ranks = config.learner.ranks
    limit = placement.SCHEDULE_SECONDS if os.environ.get("RAY_ADDRESS") else LOCAL_SECONDS
    deadline = time.monotonic() + limit
    while workers != "all":
        supply = ray.cluster_resources()
        wants: dict[str, float] = defaultdict(float)
        for each, n in ((placement.demand(config.rollout, supply), workers), (learner.demand(), ranks)):
            for name, amount in each.items():
                wants[name] += amount * n
        if all(amount <= supply.get(name, 0) + 1e-6 for name, amount in wants.items()):
            return
        if time.monotonic() > deadline:
            asked = ", ".join(f"{name} {amount:g}" for name, amount in wants.items())
            has = ", ".join(f"{name} {supply.get(name, 0):g}" for name in wants)
            raise EnvironmentLacks(
                f"rollout.workers={workers} and learner.ranks={ranks} ask for {asked}; the cluster has "
                f"{has}, also after {limit:g} s"
            )
        await asyncio.sleep(0.5)


def starting(pool: RolloutPool, learner: LearnerGroup) -> str:
    """The parts that have not started yet, for the line that a waiting run prints."""
    workers = [
        f"rollout worker {w.id} ({w.state}{w.waits_for and ': '}{w.waits_for})"
        for w in pool.workers()
        if w.state != "ready"
    ]
    return ", ".join([*workers, *([] if learner.where else ["the learner"])]) + busy()


async def _start_on_gpus(pool: RolloutPool, learner: LearnerGroup, rollout: RolloutSettings) -> None:
    if not rollout.share_gpus:
        if rollout.workers_per_gpu > 1:
            # Ray spreads parts of GPUs over nodes, and a rank needs a whole one: it takes its own first.
            await asyncio.to_thread(learner.prepare)
        await asyncio.gather(pool.start(), asyncio.to_thread(learner.start))
        return
    # An engine measures the free memory when it starts: till then the learner uses host memory. Ranks placed
    # before the workers hold their shares could both get the same GPU.
    await pool.start(beside=partial(asyncio.to_thread, learner.prepare))
    await pool.sleep()
    await asyncio.to_thread(learner.start)


@dataclass(frozen=True)
class Prepared:
    """What a run has read before anything slow starts."""

    tokenizer: Any
    cursor: PromptCursor
    held_out: list[Question]


async def prepared(config: Config, model: Path, say: Say, resumed: Resumed | None) -> Prepared:
    """Read questions and tokenizer, and look for the mistakes that can be seen so far.

    Raises UserError, and EnvironmentLacks where there is no room, or no retriever or Redis at its address."""
    train = questions_of(config, config.data.train, say)
    await asyncio.to_thread(check_learner_files, config)
    check_room(config, model)
    tokenizer = load_tokenizer(model)
    await asyncio.to_thread(check_prompts, "data.train", train, tokenizer, config.rollout, trained=True)
    may_change = resumed.allowed if resumed else frozenset()
    cursor = PromptCursor(train, config.seed, config.data.shuffle, may_change, config.data.weights)
    if resumed:
        cursor.load_state_dict(resumed.state["cursor"])
    held_out = await asyncio.to_thread(held_out_of, config, tokenizer, say)
    await asyncio.to_thread(check_held_out, config, train, held_out, say)
    await asyncio.to_thread(check_addresses, config)
    await asyncio.to_thread(check_store, config)
    return Prepared(tokenizer, cursor, held_out)


@asynccontextmanager
async def start_system(
    config: Config,
    model: Path,
    folder: RunFolder,
    say: Say,
    *,
    own: OwnParts,
    identity: dict[str, Any],
    resumed: Resumed | None = None,
) -> AsyncIterator[System]:
    """Start everything, with the model of a folder. On leaving, end everything that was started here.

    own: the user's parts that the driver calls. resumed: the checkpoint to go on from; its questions are
    compared before anything slow starts."""
    ready = await prepared(config, model, say, resumed)
    workers = config.rollout.workers
    ranks = config.learner.ranks
    joined = bool(os.environ.get("RAY_ADDRESS"))
    async with AsyncExitStack() as stack:
        connect_ray(say)
        stack.callback(leave_ray)
        placement.check_gpus(config.rollout, ranks, ray.cluster_resources())
        learner = LearnerGroup(config, model_path=str(model), reference=config.algorithm.kl > 0)
        if not joined:  # nothing joins a local Ray later, so its lack of room is told before the indexing
            await wait_for_room(config, learner)
        # At the end records come first, whatever hangs afterwards; then the workers, then their retrievers.
        retrievers = await stack.enter_async_context(AsyncExitStack())
        workers_of_pool = await stack.enter_async_context(AsyncExitStack())
        records = await stack.enter_async_context(AsyncExitStack())
        services = await start_services(config, retrievers, say, records=records)
        assert services.store is not None
        pool = _pool(config, model, services, lambda event: folder.event(**event), learner_ranks=ranks)
        workers_of_pool.push_async_callback(pool.close)
        stack.callback(learner.close)
        if joined:
            with told(say, f"room on the cluster for {workers} rollout workers and {ranks} learner ranks"):
                await wait_for_room(config, learner)
        say("starting rollout workers and learner")
        with told(say, lambda: starting(pool, learner)):
            await _start_on_gpus(pool, learner, config.rollout)
        for rank in learner.where[:1]:
            if rank.activations:
                say(rank.activations)
        yield System(
            tokenizer=ready.tokenizer,
            eval_questions=ready.held_out,
            retriever_url=services.retriever_url,
            eval_retriever_url=services.eval_retriever_url,
            pool=pool,
            config=config,
            folder=folder,
            cursor=ready.cursor,
            store=services.store,
            learner=learner,
            reward=own.reward,
            metrics=own.metrics,
            identity=identity,
        )
