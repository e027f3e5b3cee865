"""The retriever as an MCP server, asked by the official client: over HTTP, and over stdin and stdout of the
command."""

import sys
from pathlib import Path

import pytest

from retriever_service.http.launch import serve_in_thread
from retriever_service.settings import ServerSettings
from tests.retriever_fixtures import small_index  # noqa: F401

pytest.importorskip("mcp")
from mcp import Client, StdioServerParameters, stdio_client

ROOT = Path(__file__).parent.parent


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


async def test_a_client_that_starts_the_command_searches_over_stdin_and_stdout(small_index):
    words = ["-m", "retriever_service", "serve", "--index", str(small_index), "--mcp"]
    started = StdioServerParameters(
        command=sys.executable, args=words, env={"PYTHONPATH": str(ROOT)}, cwd=ROOT
    )
    async with Client(stdio_client(started)) as client:
        check(*await asked(client))
