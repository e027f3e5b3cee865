"""The services that a configuration names by their addresses."""

from __future__ import annotations

from collections.abc import Iterator

from services.common.errors import EnvironmentLacks, UserError
from services.common.http.addresses import is_http
from services.common.redaction import address_without_secrets
from services.likelihood.store.opening import is_redis, open_store
from trainer.commands.checks.findings import Finding, status_of
from trainer.config.schema import Config
from trainer.session.preflight.retrievers import retrievers_of


def check_services(config: Config) -> Iterator[Finding]:
    """Retrievers, likelihood service and Redis."""
    for key, settings in retrievers_of(config):
        if settings.url:
            yield from check_address(f"{key}.url", settings.url)
    url = config.store.url
    if url and is_http(url):
        yield from check_address("store.url", url)
    elif url and is_redis(url):
        yield from _check_redis(url)


def check_address(key: str, url: str) -> Iterator[Finding]:
    """Whether a service can serve. One that cannot yet is waited for by a run."""
    status, reason = status_of(f"{url.rstrip('/')}/readyz")
    # Search-R1's own server and its forks have no such route.
    if status is not None and (status < 400 or status == 404):
        yield Finding(key, "good", f"{url} answers")
    elif status == 503:
        yield Finding(key, "note", url, f"is up and not ready: {reason}; a run waits for it")
    else:
        yield Finding(key, "bad", url, f"does not answer from here: {reason}")


def _check_redis(url: str) -> Iterator[Finding]:
    shown = address_without_secrets(url, user="")
    try:
        open_store(url).close()
    except (EnvironmentLacks, UserError) as e:
        yield Finding("store.url", "bad", shown, str(e))
    else:
        yield Finding("store.url", "good", f"{shown} answers")
