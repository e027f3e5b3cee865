"""The services that a configuration names by their addresses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from retriever_service.client import NO_SUCH_ROUTE, Hit, RetrieverClient
from services.common.counting import counted
from services.common.errors import EnvironmentLacks, UserError
from services.common.http.addresses import is_http
from services.common.printing.harmless import in_one_line
from services.common.redaction import address_without_secrets
from services.likelihood.store.opening import is_redis, open_store
from trainer.commands.checks.doctor_reward import first_question
from trainer.commands.checks.findings import Finding, status_of
from trainer.config.schema import Config
from trainer.session.preflight.retrievers import retrievers_of

SEARCH_SECONDS = 10.0
"""Longest wait for a search, where a run waits longer."""
SHOWN = 60
"""Characters of a question that are shown."""


def check_services(config: Config) -> Iterator[Finding]:
    """Retrievers, likelihood service and Redis."""
    for key, settings in retrievers_of(config):
        if settings.url:
            seconds = min(settings.timeout_seconds, SEARCH_SECONDS)
            asked = first_question(config).text
            yield check_retriever(f"{key}.url", settings.url, asked, config.rollout.topk, seconds)
    url = config.store.url
    if url and is_http(url):
        yield check_address("store.url", url)
    elif url and is_redis(url):
        yield from _check_redis(url)


def check_address(key: str, url: str) -> Finding:
    """Whether a service can serve. One that cannot yet is waited for by a run."""
    status, reason = status_of(f"{url.rstrip('/')}/readyz")
    if status is not None and (status < 400 or status in NO_SUCH_ROUTE):
        return Finding(key, "good", f"{url} answers")
    if status == 503:
        return Finding(key, "note", url, f"is up and not ready: {reason}; a run waits for it")
    return Finding(key, "bad", url, f"does not answer from here: {reason}")


def check_retriever(key: str, url: str, question: str, topk: int, seconds: float) -> Finding:
    """Whether it can serve, and answers a search in a form that a run takes."""
    found = check_address(key, url)
    if found.level != "good":
        return found
    try:
        hits = asyncio.run(_searched(url, question, topk, seconds))
    except (EnvironmentLacks, UserError) as e:
        form = "expected a server that answers POST /retrieve as Search-R1's does (docs/retriever.md)"
        return Finding(key, "bad", url, f"{e}; {form}")
    seen = f"{url} answers: {counted(len(hits), 'passage')} of {in_one_line(question, SHOWN)!r}"
    if hits:
        return Finding(key, "good", seen)
    nothing = "none for the first question of the run; a policy that reads nothing learns no search"
    return Finding(key, "note", seen, nothing)


async def _searched(url: str, question: str, topk: int, seconds: float) -> list[Hit]:
    async with RetrieverClient(url, timeout_seconds=seconds) as client:
        (hits,) = await client.retrieve([question], topk)
    return hits


def _check_redis(url: str) -> Iterator[Finding]:
    shown = address_without_secrets(url, user="")
    try:
        open_store(url).close()
    except (EnvironmentLacks, UserError) as e:
        yield Finding("store.url", "bad", shown, str(e))
    else:
        yield Finding("store.url", "good", f"{shown} answers")
