"""The documentation of the server, as it answers it."""

from __future__ import annotations

import httpx

from tests.retriever.retriever_fixtures import server, small_index  # noqa: F401


def test_the_examples_of_the_documentation_work(server):
    description = httpx.get(f"{server.url}/openapi.json", trust_env=False).json()
    body = description["paths"]["/retrieve"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    for example in body["examples"]:
        assert httpx.post(f"{server.url}/retrieve", json=example, trust_env=False).status_code == 200
    assert "curl" in description["paths"]["/retrieve"]["post"]["description"]
