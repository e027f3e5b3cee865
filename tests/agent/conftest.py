"""A policy that searches, and the service that it asks."""

from __future__ import annotations

import pytest
from rollout_models import searcher
from rollout_search import search_server


@pytest.fixture(scope="module")
def search():
    with search_server() as state:
        yield state


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("searcher")
    searcher(folder, seed=1)
    return str(folder)
