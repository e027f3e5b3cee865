"""Everything that a run needs, started in order and ended in reverse: data, model, Ray, retriever, store,
workers, learner.

What a user can get wrong is looked at first, before anything slow starts.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import ray
from ray._private import utils, worker

from retriever_service.client import RetrieverClient
from services.common import signals
from services.common.http.auth import TOKEN_VARIABLE, token_of
from services.common.semaphores import remove_dead_semaphores
from services.contracts import Question
from services.launcher import index_corpus, start_likelihood, start_retriever
from services.likelihood.client import LikelihoodClient
from services.local_ray import start_local_ray, stop_local_ray
from services.rollout.pool import placement
from services.rollout.pool.pool import RolloutPool
from services.rollout.worker.tokenizer import load_tokenizer
from services.settings import RetrieverSettings
from trainer.config.schema import Config
from trainer.data import PromptCursor, load_questions, models
from trainer.learner.group import LearnerGroup
from trainer.loop.run_folder import RunFolder
from trainer.loop.system import Serving, System
from trainer.rewards import make_reward
from trainer.session.preflight import check_prompts, check_retrievers, check_room
from trainer.session.ray_watch import RECONNECT_SECONDS
from trainer.session.resume_rules import Resumed
from trainer.session.waits import told

Say = Callable[[str], None]
LOCAL_SECONDS = 2.0
"""For a local Ray to tell what it has; no other node joins it."""


class RayUnavailable(RuntimeError):
    """There is no Ray to work on."""

    exit_code = 3


@contextmanager
def _in_a_group_of_their_own() -> Iterator[None]:
    """Processes that Ray starts inside do not hear what the driver's process group is sent, as `timeout`
    does: a stop would find no Ray left for its checkpoint. Ray's own function runs in each of them before its
    program does; they still end with this process."""
    bound = utils.set_kill_on_parent_death_linux

    def apart() -> None:
        bound()
        os.setpgrp()

    utils.set_kill_on_parent_death_linux = apart
    try:
        yield
    finally:
        utils.set_kill_on_parent_death_linux = bound


def connect_ray(say: Say) -> None:
    """Join the cluster of RAY_ADDRESS (set inside `ray job submit`), else start a local Ray, which ends with
    this process and answers nobody else. `leave_ray` undoes it. Raises RayUnavailable."""
    address = os.environ.get("RAY_ADDRESS")
    say(f"joining Ray at {address}" if address else "starting a local Ray")
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    # Read by a Ray that starts here: without its head it lives on, for the run to save what it has.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(RECONNECT_SECONDS))
    try:
        # Ray puts its own handlers in place of ours, which would end the process in the middle of a clean
        # stop.
        with signals.kept(), _in_a_group_of_their_own(), told(say, "Ray to start"):
            if address:
                # A job may bring some of these variables itself (--runtime-env), and Ray refuses the same
                # name twice unless told which one holds.
                os.environ.setdefault("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")
                ray.init(address=address, runtime_env={"env_vars": worker_environment()}, **options)
            else:
                start_local_ray(include_dashboard=False, **options)
    except Exception as e:  # a raylet that is not up in time is a bare one
        reason = " ".join(str(e).split())[:300]
        busy = "a local Ray did not start (on a busy machine: try again, or set RAY_raylet_start_wait_time_s=120)"
        what = f"RAY_ADDRESS={address}: cannot join that cluster" if address else busy
        raise RayUnavailable(f"{what}: {reason}") from e
    else:
        _silence_ray()


def _silence_ray() -> None:
    """What Ray prints of its own accord (that a process died, with its last 20 lines and escape codes) is in
    its session's logs. What it means for the run is said by the run."""
    worker._worker_logs_enabled = False
    log = logging.getLogger("ray")
    log.addHandler(logging.NullHandler())
    log.propagate = False


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


async def retriever_address(
    settings: RetrieverSettings, name: str, config: Config, stack: AsyncExitStack, say: Say
) -> str:
    """Address of a ready retriever: the one given, or one started here on the index or corpus."""
    url = settings.url
    if url is None:
        index = settings.index
        if index is None:
            index = str(config.run_dir / f"{name}_index")
            say(f"indexing {settings.corpus}")
            corpus = models.resolve_file(settings.corpus)
            with told(say, f"the index of {settings.corpus}"):
                skipped = await asyncio.to_thread(index_corpus, corpus, index, skip_bad=settings.skip_bad)
            if skipped:
                say(f"{settings.corpus}: {skipped:,} malformed lines left out (skip_bad)")
        with told(say, f"the retriever on {index} to start"):
            service = await asyncio.to_thread(
                start_retriever,
                index,
                topk=config.rollout.topk,
                name=f"unspiral-{config.run.name}-{name}",
                timeout_seconds=settings.start_timeout_seconds,
            )
        stack.callback(service.stop)
        url = service.url
    client = RetrieverClient(url, timeout_seconds=settings.timeout_seconds)
    try:
        await client.wait_ready(settings.start_timeout_seconds, on_wait=say)
    finally:
        await client.aclose()
    return url


async def likelihood_store(config: Config, stack: AsyncExitStack) -> LikelihoodClient:
    """Client of the likelihood service: the one given, or one started here on the store."""
    url, token_steps = config.store.url, max(config.store.token_steps, config.probe.lag_steps + 1)
    if url is None or not url.startswith(("http://", "https://")):
        service = await asyncio.to_thread(
            start_likelihood,
            url or f"sqlite:{(config.run_dir / 'likelihood.db').resolve()}",
            token_steps=token_steps,
            name=f"unspiral-{config.run.name}-likelihood",
            rules=config.monitor.rules,
        )
        stack.callback(service.stop)
        url = service.url
    token = token_of(TOKEN_VARIABLE)
    store = LikelihoodClient(url, spool_dir=config.run_dir / "spool", token=token, token_steps=token_steps)
    stack.callback(store.close)
    return store


def questions_of(config: Config, file: str, say: Say) -> list[Question]:
    """The questions of a file; says how many malformed rows were left out."""
    loaded = load_questions(models.resolve_file(file), skip_bad=config.data.skip_bad)
    if loaded.skipped:
        say(f"{file}: {loaded.skipped:,} malformed rows left out (data.skip_bad)")
    return loaded.rows


@asynccontextmanager
async def start_serving(
    config: Config,
    model: Path,
    say: Say,
    on_event: Callable[[dict[str, Any]], None],
    *,
    learner_ranks: int = 0,
) -> AsyncIterator[Serving]:
    """Ray, retrievers and the pool's plan. The caller starts the pool; on leaving, all of it is ended.
    learner_ranks: that will run beside."""
    check_retrievers(config)
    held_out = (
        questions_of(config, config.data.eval, say)[: config.evaluation.limit] if config.data.eval else []
    )
    tokenizer = load_tokenizer(model)
    await asyncio.to_thread(check_prompts, "data.eval", held_out, tokenizer, config.rollout)
    async with AsyncExitStack() as stack:
        connect_ray(say)
        stack.callback(leave_ray)
        placement.check_gpus(config.rollout, learner_ranks, ray.cluster_resources())
        url, eval_url = await retriever_address(config.retriever, "retriever", config, stack, say), None
        if config.evaluation.retriever:
            eval_url = await retriever_address(
                config.evaluation.retriever, "eval_retriever", config, stack, say
            )
        pool = RolloutPool(
            config.rollout,
            model_path=str(model),
            retriever_url=url,
            retriever_timeout_seconds=config.retriever.timeout_seconds,
            sync=config.weight_sync,
            on_event=on_event,
            learner_gpus=0 if config.rollout.share_gpus else learner_ranks,
        )
        stack.push_async_callback(pool.close)
        yield Serving(tokenizer, held_out, url, eval_url, pool)


async def wait_for_room(config: Config, learner: LearnerGroup) -> None:
    """Return once the cluster could hold all workers and ranks; nodes may still be joining one that was there
    before this run.

    Raises UnschedulableError with demand and supply after SCHEDULE_SECONDS (LOCAL_SECONDS in our own local
    Ray), LearnerPlacementError.
    """
    workers, ranks = config.rollout.workers, config.learner.ranks
    limit = placement.SCHEDULE_SECONDS if os.environ.get("RAY_ADDRESS") else LOCAL_SECONDS
    deadline = time.monotonic() + limit
    while workers != "all":
        supply, wants = ray.cluster_resources(), Counter()
        for each, n in ((placement.demand(config.rollout, supply), workers), (learner.demand(), ranks)):
            wants.update({name: amount * n for name, amount in each.items()})
        if all(amount <= supply.get(name, 0) + 1e-6 for name, amount in wants.items()):
            return
        if time.monotonic() > deadline:
            asked = ", ".join(f"{name} {amount:g}" for name, amount in wants.items())
            has = ", ".join(f"{name} {supply.get(name, 0):g}" for name in wants)
            raise placement.UnschedulableError(
                f"rollout.workers={workers} and learner.ranks={ranks} ask for {asked}; the cluster has {has}, also after {limit:g} s"
            )
        await asyncio.sleep(0.5)


def starting(pool: RolloutPool, learner: LearnerGroup) -> str:
    """What has not started yet."""
    workers = [f"rollout worker {w.id} ({w.state})" for w in pool.workers() if w.state != "ready"]
    return ", ".join([*workers, *([] if learner.where else ["the learner"])])


@asynccontextmanager
async def start_system(
    config: Config,
    model: Path,
    folder: RunFolder,
    say: Say,
    *,
    identity: dict[str, Any],
    resumed: Resumed | None = None,
) -> AsyncIterator[System]:
    """Start everything, on the model's folder; on leaving, end everything that was started here.

    resumed: the checkpoint to go on from; its questions are compared before anything slow starts."""
    train, reward = questions_of(config, config.data.train, say), make_reward(config.reward.kind)
    check_room(config, model)
    await asyncio.to_thread(check_prompts, "data.train", train, load_tokenizer(model), config.rollout)
    may_change = resumed.allowed if resumed else frozenset()
    cursor = PromptCursor(train, config.seed, config.data.shuffle, may_change)
    if resumed:
        cursor.load_state_dict(resumed.state["cursor"])
    ranks = config.learner.ranks
    async with (
        start_serving(
            config, model, say, lambda event: folder.event(**event), learner_ranks=ranks
        ) as serving,
        AsyncExitStack() as stack,
    ):
        with told(say, "the likelihood service to start"):
            store = await likelihood_store(config, stack)
        learner = LearnerGroup(config, model_path=str(model), reference=config.algorithm.kl > 0)
        stack.callback(learner.close)
        with told(
            say, f"room on the cluster for {config.rollout.workers} rollout workers and {ranks} learner ranks"
        ):
            await wait_for_room(config, learner)
        say("starting rollout workers and learner")
        with told(say, lambda: starting(serving.pool, learner)):
            if config.rollout.share_gpus:
                # An engine measures the free memory when it starts, so the learner comes second.
                await serving.pool.start()
                await serving.pool.sleep()
                await asyncio.to_thread(learner.start)
            else:
                await asyncio.gather(serving.pool.start(), asyncio.to_thread(learner.start))
        yield System(
            **vars(serving),
            config=config,
            folder=folder,
            cursor=cursor,
            store=store,
            learner=learner,
            reward=reward,
            identity=identity,
        )
