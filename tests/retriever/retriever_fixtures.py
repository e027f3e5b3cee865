"""A small index and a running server over it, shared by the retriever's tests."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from places import DATA

from retriever_service.http.launch import serve_in_thread
from retriever_service.indexing.build import build_index
from retriever_service.settings import ServerSettings

CORPUS = DATA / "retriever_corpus.jsonl"


@pytest.fixture(scope="session")
def small_index(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("index") / "small"
    build_index(CORPUS, out)
    return out


@pytest.fixture(scope="module")
def server(small_index):
    with serve_in_thread(ServerSettings(index=str(small_index), port=0)) as running:
        yield running


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client:
        yield client
