"""The retriever as an MCP server, asked by the official client: over HTTP, and over stdin and stdout of the
command."""

import sys

import httpx
import pytest
from places import ROOT

from retriever_service.http.launch import serve_in_thread
from retriever_service.settings import ServerSettings
from tests.retriever.retriever_fixtures import small_index  # noqa: F401

pytest.importorskip("mcp")
from mcp import Client, StdioServerParameters, stdio_client


async def asked(client):
    (tool,) = (await client.list_tools()).tools
    found = await client.call_tool("search", {"query": "Mina Frost", "topk": 2})
    none = await client.call_tool("search", {"query": "\0", "topk": 5000})
    wrong = await client.call_tool("search", {"query": "a", "topk": -1})
    return tool, found, none, wrong


def check(tool, found, none, wrong):
    assert tool.name == "search" and set(tool.input_schema["properties"]) == {"query", "topk"}
    passages = found.structured_content["passages"]
    assert len(passages) == 2 and "Mina Frost" in passages[0]["contents"] and passages[0]["score"] > 0
    assert none.structured_content == {"passages": []}
    assert wrong.is_error


async def test_a_client_searches_over_http(small_index):
    with serve_in_thread(ServerSettings(index=str(small_index), port=0, mcp=True)) as running:
        async with Client(f"{running.url}/mcp") as client:
            check(*await asked(client))


def test_a_body_above_the_limit_is_a_413_at_mcp_too(small_index):
    settings = ServerSettings(index=str(small_index), port=0, mcp=True, max_body_bytes=10_000)
    headers = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
    parts = {"declared": b" " * 20_000, "in chunks": iter([b" " * 6000] * 4)}
    with serve_in_thread(settings) as running:
        for how, content in parts.items():
            answer = httpx.post(f"{running.url}/mcp", content=content, headers=headers, trust_env=False)
            assert (answer.status_code, answer.json()["limit"]) == (413, 10_000), how
        wrong = httpx.post(f"{running.url}/mcp", content=b"{", headers=headers, trust_env=False)
        assert wrong.status_code == 400


async def test_a_client_that_starts_the_command_searches_over_stdin_and_stdout(small_index):
    words = ["-m", "retriever_service", "serve", "--index", str(small_index), "--mcp"]
    started = StdioServerParameters(
        command=sys.executable, args=words, env={"PYTHONPATH": str(ROOT)}, cwd=ROOT
    )
    async with Client(stdio_client(started)) as client:
        check(*await asked(client))
