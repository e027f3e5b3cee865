"""The retriever as a server of the Model Context Protocol: one tool, `search`, over HTTP at `/mcp` or over
stdin and stdout.

Needs the package `mcp`. Over HTTP it stands behind the same gate as every other route.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import orjson
from fastapi import FastAPI
from pydantic import Field

from retriever_service.http.forms.leniency import clamped, cleaned
from retriever_service.http.service import Service
from retriever_service.http.web import BoundedBodies
from retriever_service.search import backends
from retriever_service.search.search_index import PartHits
from retriever_service.settings import ServerSettings
from services.common.http.bodies import Room
from services.common.loading.extras import needed_for

PATH = "/mcp"
_ABOUT = "Searches a corpus and returns the best passages, best first, each with its id, contents and score."


def require_mcp() -> type:
    """The package's server class. Raises EnvironmentLacks without it."""
    with needed_for("--mcp needs version 2 of mcp", "mcp"):
        from mcp.server import MCPServer
    return MCPServer


def mcp_server(service: Service) -> Any:
    """The server over one service. Raises EnvironmentLacks without the package."""
    settings = service.settings

    async def search(
        query: Annotated[str, Field(description="What to search for.")],
        topk: Annotated[int, Field(ge=1, description="Most passages to return.")] = settings.topk,
    ) -> dict[str, Any]:
        (text,) = cleaned([query], "query", settings.max_query_chars, [], alone=True)
        most = clamped(topk, settings.max_topk, "topk", [])
        (hits,) = await service.search([text], most, settings.request_timeout_seconds)
        found = {"passages": [orjson.loads(document) | {"score": score} for document, score in hits]}
        return found | ({"partial": hits.missing} if isinstance(hits, PartHits) else {})

    server = require_mcp()("unspiral-retriever", instructions=_ABOUT, version="1", log_level="WARNING")
    server.add_tool(search, name="search", description=_ABOUT)
    return server


@asynccontextmanager
async def mounted(app: FastAPI, service: Service, bodies: Room) -> AsyncIterator[None]:
    """Serve it over HTTP at `/mcp` of the application, without sessions, so that any worker answers any
    request. `bodies` is the room for what is in flight."""
    server = mcp_server(service)
    # Behind the package's own check of Host and Origin too, where the server listens on this machine alone.
    inner = server.streamable_http_app(
        streamable_http_path=PATH, stateless_http=True, json_response=True, host=service.settings.host
    )
    for route in inner.routes:
        route.app = BoundedBodies(route.app, service.settings, bodies)
    app.router.routes += inner.routes
    async with server.session_manager.run():
        yield


def is_started_by_client() -> bool:
    """Whether stdin and stdout are both pipes or sockets, as an MCP client that starts a server makes
    them."""
    modes = [os.fstat(number).st_mode for number in (0, 1)]
    return all(stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) for mode in modes)


def run_stdio(settings: ServerSettings) -> int:
    """Serve over stdin and stdout until stdin ends, and return the exit status. Raises what is wrong with the
    index."""
    backends.check_settings(settings)
    service = Service(settings, lambda: backends.open_index(settings))

    async def serve() -> None:
        await service.load()
        if service.failure is not None:
            raise service.failure
        try:
            await mcp_server(service).run_stdio_async()
        finally:
            await service.stop()

    asyncio.run(serve())
    return 0
