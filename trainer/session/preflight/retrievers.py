"""What a run searches: index folders, corpora, and addresses of running retrievers."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import httpx

from retriever_service.addresses import check_address
from retriever_service.errors import IndexInvalid
from retriever_service.index_folder.description import read_info
from retriever_service.search.users_index import load_search
from services.common.errors import EnvironmentLacks, UserError
from services.common.loading.user_code import is_import_path
from services.common.names import near_path
from services.common.redaction import address_without_secrets
from services.settings import RetrieverSettings
from trainer.config.schema import Config
from trainer.data import models
from trainer.session.preflight.corpora import check_corpus

LISTEN_SECONDS = 5.0
"""Longest wait, before Ray starts, for a server to take a connection at a retriever's address: one that is
being started beside the run may need a moment."""
TRY_SECONDS = 0.25


def retrievers_of(config: Config) -> Iterator[tuple[str, RetrieverSettings]]:
    """Those that are set, by key."""
    yield "retriever", config.retriever
    if config.evaluation.retriever:
        yield "evaluation.retriever", config.evaluation.retriever


def indexes_of(config: Config) -> dict[str, str]:
    """Index folders that a configuration names, by key."""
    return {
        f"{key}.index": settings.index
        for key, settings in retrievers_of(config)
        if settings.index and not is_import_path(settings.index)
    }


def check_retrievers(config: Config) -> None:
    """Raises UserError where an index folder or a corpus file is not there, or no index can be made of the
    corpus."""
    for key, index in indexes_of(config).items():
        check_index(key, index)
    for key, settings in retrievers_of(config):
        if settings.index and is_import_path(settings.index):
            load_search(f"{key}.index", settings.index)
        corpus = settings.corpus
        if corpus and not models.is_there(corpus):
            hint = near_path(corpus) or "; docs/data.md says what is read"
            raise UserError(f"{key}.corpus: {corpus}: no such file or folder{hint}")
        check_corpus(key, settings)


def check_addresses(config: Config) -> None:
    """Raises EnvironmentLacks where nothing listens at a retriever's address. Asked last of all checks, since
    it may wait for LISTEN_SECONDS, and before Ray starts."""
    for key, settings in retrievers_of(config):
        if settings.url:
            _check_listener(f"{key}.url", settings.url, min(LISTEN_SECONDS, settings.start_timeout_seconds))


def _check_listener(key: str, url: str, seconds: float) -> None:
    """A server that still loads its index takes a connection too, and is waited for later."""
    check_address(key, url, "http://HOST:PORT or https://HOST:PORT is accepted")
    parts = httpx.URL(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    until = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((parts.host, port), max(0.1, until - time.monotonic())).close()
            return
        except OSError as e:
            if time.monotonic() + TRY_SECONDS > until:
                raise EnvironmentLacks(
                    f"{key}: nothing listens at {address_without_secrets(url)}, tried for {seconds:g} s "
                    f"({e.strerror or e}); expected a running retriever there, such as `unspiral serve "
                    f"retriever INDEX --port {port}`; or give {key.removesuffix('url')}index or .corpus, and "
                    "the run starts one itself"
                ) from e
        time.sleep(TRY_SECONDS)


def check_index(key: str, folder: str) -> None:
    """Raises UserError, with the key, where a folder is no index; the index's files are not looked at."""
    try:
        read_info(folder)
    except IndexInvalid as e:
        raise UserError(f"{key}: {str(e).removeprefix('index ')}") from None
