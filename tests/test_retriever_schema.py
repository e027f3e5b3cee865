"""The server against its own OpenAPI description: no input makes a 5xx, and what is described is what comes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from retriever_service.http.launch import serve_in_thread
from retriever_service.settings import ServerSettings
from tests.retriever_fixtures import server, small_index  # noqa: F401
from tests.retriever_models import tiny_reranker  # noqa: F401

SCHEMATHESIS = Path(sys.executable).with_name("schemathesis")


@pytest.mark.skipif(not SCHEMATHESIS.exists(), reason="needs schemathesis")
def test_no_input_makes_a_server_error_and_answers_are_as_described(small_index, tiny_reranker):
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,unsupported_method"
    with serve_in_thread(ServerSettings(index=str(small_index), port=0, reranker=tiny_reranker)) as running:
        words = [
            SCHEMATHESIS,
            "run",
            f"{running.url}/openapi.json",
            "--checks",
            checks,
            "--max-examples",
            "30",
            "--seed",
            "7",
        ]
        words += ["--suppress-health-check", "all", "--generation-database", "none", "--no-color"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0 and "Tested: 9" in done.stdout, done.stdout[-3000:]


def test_the_examples_of_the_documentation_work(server):
    description = httpx.get(f"{server.url}/openapi.json", trust_env=False).json()
    body = description["paths"]["/retrieve"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    for example in body["examples"]:
        assert httpx.post(f"{server.url}/retrieve", json=example, trust_env=False).status_code == 200
    assert "curl" in description["paths"]["/retrieve"]["post"]["description"]
