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

from retriever_service.client import RetrieverClient
from retriever_service.errors import RetrieverUnavailable
from services.common.errors import EnvironmentLacks, UserError
from services.common.http.auth import TOKEN_VARIABLE, token_of
from services.common.processes import signals
from services.common.processes.host_limits import lack_of_open_files, lack_of_threads
from services.common.processes.semaphores import remove_dead_semaphores
from services.common.redaction import address_without_secrets
from services.contracts import Question
from services.launcher import Service, index_corpus, start_likelihood, start_retriever
from services.likelihood.client import LikelihoodClient
from services.local_ray import start_local_ray, stop_local_ray
from services.rollout.pool import placement
from services.rollout.pool.pool import RolloutPool
from services.rollout.worker.tokenizer import load_tokenizer
from services.settings import RetrieverSettings
from trainer.config.schema import Config
from trainer.data import PromptCursor, load_questions, models
from trainer.learner.group import LearnerGroup
from trainer.loop.run.run_folder import RunFolder
from trainer.loop.run.system import Serving, System
from trainer.session.own_parts import OwnParts
from trainer.session.preflight import (
    check_addresses,
    check_held_out,
    check_learner_files,
    check_prompts,
    check_retrievers,
    check_room,
    keys_of,
)
from trainer.session.ray_watch import (
    RECONNECT_SECONDS,
    StartLimit,
    in_a_group_of_their_own,
    not_up,
    silence_ray,
)
from trainer.session.resuming.rules import Resumed
from trainer.session.waits import busy, told

Say = Callable[[str], None]
CANCEL_SECONDS = 10.0
"""Longest wait, when a start is cut short, for the service that is starting."""
LOCAL_SECONDS = 2.0
"""Longest wait for a local Ray to report its resources; no other node joins it."""


def connect_ray(say: Say) -> None:
    """Join the cluster of RAY_ADDRESS (set inside `ray job submit`), otherwise start a local Ray, which ends
    with this process and answers nobody else. `leave_ray` undoes it.

    Raises EnvironmentLacks, also where Ray is not up within RAY_SECONDS, and Stopped after a signal: Ray's
    start blocks the event loop, for minutes on a busy machine."""
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        for lack in filter(None, (lack_of_threads(), lack_of_open_files())):
            say(f"warning: {lack}")
    say(f"joining Ray at {address}" if address else "starting a local Ray")
    limit = StartLimit(address)
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    # Read by a Ray that starts here: without its head it lives on, for the run to save what it has.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(RECONNECT_SECONDS))
    try:
        # Ray puts its own handlers in place of ours, which would end the process within a clean stop.
        with (
            signals.cut_short(limit.left),
            signals.kept(),
            limit.kept(),
            in_a_group_of_their_own(),
            told(say, lambda: f"Ray to start{busy()}"),
        ):
            if address:
                # A job may bring some of these variables itself (--runtime-env), and Ray refuses the same
                # name twice unless told which one holds.
                os.environ.setdefault("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")
                ray.init(address=address, runtime_env={"env_vars": worker_environment()}, **options)
            else:
                start_local_ray(include_dashboard=False, **options)
    except signals.Stopped:
        leave_ray()
        if limit.reached.is_set():
            raise limit.late() from None
        raise
    except Exception as e:  # a raylet that is not up in time is a bare one
        reason = " ".join(str(e).split())[:300]
        raise EnvironmentLacks(f"{not_up(address)}: {reason}") from e
    else:
        silence_ray()


def leave_ray() -> None:
    """Leave the cluster, or end the local Ray, and clear away what its engines left."""
    stop_local_ray()
    remove_dead_semaphores()


def worker_environment() -> dict[str, str]:
    """The only variables that travel to actors by Ray's runtime environment: an allow-list, since these are
    shown on the dashboard."""
    allowed = (
        "HF_HUB_OFFLINE",
        "UNSPIRAL_CACHE",
        "TORCH_EXTENSIONS_DIR",
        "NCCL_NVLS_ENABLE",
        "NCCL_CUMEM_ENABLE",
        "RAY_AUTH_MODE",
    )
    return {k: os.environ[k] for k in allowed if k in os.environ}


async def _started(start: Callable[[], Service], stack: AsyncExitStack) -> str:
    """The address of a service that `start` starts, in a thread; it is stopped with the stack.

    When this is cancelled, the start is waited for, up to CANCEL_SECONDS: its thread is in the middle of a
    call to Ray, which should not be shut down under it.
    """
    starting = asyncio.ensure_future(asyncio.to_thread(start))
    # One that is left behind fails when Ray ends, which nobody needs to hear of.
    starting.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    try:
        service = await asyncio.shield(starting)
    except asyncio.CancelledError:
        await asyncio.wait({starting}, timeout=CANCEL_SECONDS)
        if starting.done() and not starting.cancelled() and starting.exception() is None:
            stack.callback(starting.result().stop)
        raise
    stack.callback(service.stop)
    return service.url


async def retriever_address(
    settings: RetrieverSettings,
    name: str,
    config: Config,
    stack: AsyncExitStack,
    say: Say,
    index: str | None = None,
) -> str:
    """Address of a ready retriever: the one given, or one started here on the index or corpus.

    index: of `index_of`, where it was made already."""
    url = settings.url
    limit = settings.start_timeout_seconds
    key = f"{'evaluation.' if settings is config.evaluation.retriever else ''}retriever"
    longest = f"{key}.start_timeout_seconds"
    if url is None:
        index = index or await index_of(settings, name, config, say)
        with told(say, f"the retriever on {index} to start"):
            actor = f"unspiral-{config.run.name}-{name}"
            start = partial(
                start_retriever,
                index,
                topk=config.rollout.topk,
                name=actor,
                timeout_seconds=limit,
                key=longest,
            )
            url = await _started(start, stack)
    client = RetrieverClient(url, timeout_seconds=settings.timeout_seconds)
    try:
        await client.wait_ready(limit, on_wait=say)
    except RetrieverUnavailable as e:
        raise EnvironmentLacks(
            f"{e}; expected: 200 from its /readyz, or 404 where it has none; {longest}={limit:g} is the "
            "longest wait"
        ) from e
    finally:
        await client.aclose()
    return url


async def index_of(settings: RetrieverSettings, name: str, config: Config, say: Say) -> str:
    """The folder of the retriever's index: the one given, or one of its corpus, made here."""
    if settings.index:
        return settings.index
    given = settings.corpus
    if given is None:
        raise UserError("retriever needs one of url, index, corpus")
    say(f"indexing {given}")
    folder = config.run_dir / f"{name}_index"
    make = partial(index_corpus, models.resolve_file(given), folder, keys=keys_of(settings))
    with told(say, f"the index of {given}"):
        skipped = await asyncio.to_thread(make, skip_bad=settings.skip_bad)
    if skipped:
        say(f"{given}: {skipped:,} malformed or repeated lines left out (skip_bad)")
    return str(folder)


async def likelihood_store(config: Config, stack: AsyncExitStack, say: Say) -> LikelihoodClient:
    """Client of the likelihood service: the one given, or one started here on the store."""
    url = config.store.url
    token_steps = max(config.store.token_steps, config.probe.lag_steps + 1)
    if url is None or not url.startswith(("http://", "https://")):
        with told(say, "the likelihood service to start"):
            start = partial(
                start_likelihood,
                url or f"sqlite:{(config.run_dir / 'likelihood.db').resolve()}",
                token_steps=token_steps,
                trajectory_steps=config.store.trajectory_steps,
                name=f"unspiral-{config.run.name}-likelihood",
                rules=config.monitor.rules,
            )
            url = await _started(start, stack)
    token = token_of(TOKEN_VARIABLE)
    store = LikelihoodClient(url, spool_dir=config.run_dir / "spool", token=token, token_steps=token_steps)
    stack.callback(store.close)
    say(f"live page: {address_without_secrets(store.url)}/#runs={config.run.name}")
    return store


@dataclass(frozen=True)
class Services:
    """The services of a run, ready to be asked."""

    retriever_url: str
    eval_retriever_url: str | None
    store: LikelihoodClient | None


async def start_services(
    config: Config, stack: AsyncExitStack, say: Say, *, records: AsyncExitStack | None = None
) -> Services:
    """Index what is to be indexed, then start all services of a run at the same time. They are stopped with
    the stack. records: the likelihood service is started too, and stopped with this one.

    Where one does not start, the others are ended, and its error is raised.
    """
    held_out = config.evaluation.retriever
    # One after the other: a thread that indexes cannot be stopped, and would keep a fault of the other back.
    index = held_out_index = None
    if config.retriever.url is None:
        index = await index_of(config.retriever, "retriever", config, say)
    if held_out and held_out.url is None:
        held_out_index = await index_of(held_out, "eval_retriever", config, say)
    try:
        async with asyncio.TaskGroup() as group:
            retriever = group.create_task(
                retriever_address(config.retriever, "retriever", config, stack, say, index)
            )
            evaluation = held_out and group.create_task(
                retriever_address(held_out, "eval_retriever", config, stack, say, held_out_index)
            )
            likelihood = records and group.create_task(likelihood_store(config, records, say))
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__
    return Services(
        retriever.result(),
        evaluation.result() if evaluation else None,
        likelihood.result() if likelihood else None,
    )


def questions_of(config: Config, file: str, say: Say) -> list[Question]:
    """The questions of a file; says how many malformed rows were left out."""
    loaded = load_questions(models.resolve_file(file), skip_bad=config.data.skip_bad)
    if loaded.skipped:
        say(f"{file}: {loaded.skipped:,} malformed rows left out (data.skip_bad)")
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
    workers = config.rollout.workers
    ranks = config.learner.ranks
    joined = bool(os.environ.get("RAY_ADDRESS"))
    await asyncio.to_thread(check_addresses, config)
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
            if config.rollout.share_gpus:
                # An engine measures the free memory when it starts: till then the learner uses host memory.
                # Ranks placed before the workers hold their shares could both get the same GPU.
                await pool.start(beside=partial(asyncio.to_thread, learner.prepare))
                await pool.sleep()
                await asyncio.to_thread(learner.start)
            else:
                await asyncio.gather(pool.start(), asyncio.to_thread(learner.start))
        for rank in learner.where[:1]:
            if rank.activations:
                say(rank.activations)
        yield System(
            tokenizer=tokenizer,
            eval_questions=held_out,
            retriever_url=services.retriever_url,
            eval_retriever_url=services.eval_retriever_url,
            pool=pool,
            config=config,
            folder=folder,
            cursor=cursor,
            store=services.store,
            learner=learner,
            reward=own.reward,
            metrics=own.metrics,
            identity=identity,
        )
