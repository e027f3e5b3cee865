"""The services of a run, started side by side: its retrievers, and the likelihood service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

from retriever_service.client import RetrieverClient
from retriever_service.errors import RetrieverUnavailable
from retriever_service.index_folder.description import LEFT_OUT
from services.common.counting import left_out
from services.common.errors import EnvironmentLacks, UserError
from services.common.http.addresses import is_http
from services.common.http.auth import TOKEN_VARIABLE, token_of
from services.common.redaction import address_without_secrets
from services.common.runs.paths import STORE
from services.launcher import Service, index_corpus, start_likelihood, start_retriever
from services.likelihood.client import LikelihoodClient
from services.settings import RetrieverSettings
from trainer.config.schema import Config
from trainer.data import models
from trainer.session.preflight.corpora import keys_of
from trainer.session.waits import told

Say = Callable[[str], None]
CANCEL_SECONDS = 10.0
"""Longest wait, when a start is cut short, for the service that is starting."""
FIRST_QUERY = "who is it?"
"""Asked of a retriever that was given by its address, before anything else is started."""
SECTIONS = {"retriever": "retriever", "eval_retriever": "evaluation.retriever"}
"""Keys of the retrievers of a run, by their names, which their actors and index folders have."""


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

    name: one of SECTIONS. index: of `index_of`, where it was made already."""
    url = settings.url
    limit = settings.start_timeout_seconds
    longest = f"{SECTIONS[name]}.start_timeout_seconds"
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
                concurrency=settings.concurrency,
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
    else:
        if settings.url is not None:
            await _first_search(client, settings.url, SECTIONS[name], config.rollout.topk, say)
    finally:
        await client.aclose()
    return url


async def _first_search(client: RetrieverClient, url: str, key: str, topk: int, say: Say) -> None:
    """Tell an address at which something else answers, or that is one level off, before models are loaded: a
    run would learn of it by its first search, and give each of its trajectories several tries."""
    shown = address_without_secrets(url)
    try:
        with told(say, f"a first search at {shown}"):
            await client.retrieve([FIRST_QUERY], topk)
    except RetrieverUnavailable as e:
        raise EnvironmentLacks(
            f"{e}; expected: at {key}.url a server that answers POST /retrieve as Search-R1's does; "
            f"{key}.timeout_seconds={client.timeout_seconds:g} is the longest wait"
        ) from e
    except UserError as e:
        raise UserError(f"{key}.url: {e}") from e


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
    for line in left_out(skipped.count, f"{LEFT_OUT} (skip_bad)", skipped.reasons, one="line"):
        say(line)
    return str(folder)


async def likelihood_store(config: Config, stack: AsyncExitStack, say: Say) -> LikelihoodClient:
    """Client of the likelihood service: the one given, or one started here on the store."""
    url = config.store.url
    token_steps = max(config.store.token_steps, config.probe.lag_steps + 1)
    if url is None or not is_http(url):
        with told(say, "the likelihood service to start"):
            start = partial(
                start_likelihood,
                url or f"sqlite:{(config.run_dir / STORE).resolve()}",
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
