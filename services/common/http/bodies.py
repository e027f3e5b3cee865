"""Bodies of requests: read by the service itself, so that size and memory are bounded and a mistake is said
in one line."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.common.errors import EnvironmentLacks, UserError

PART_BYTES = 256 << 10
WAIT_SECONDS = 10.0
"""Longest wait for room in memory."""


class Room:
    """Bytes that requests in flight may hold together. Used on one event loop; whoever waits has its turn in
    order.

    A request that holds all of what is held is always given more, so that one larger than the limit is served
    alone.
    """

    def __init__(self, limit: int, wait_seconds: float = WAIT_SECONDS):
        self.limit = limit
        self.wait_seconds = wait_seconds
        self.held = 0
        self._waiting: deque[tuple[int, int, asyncio.Future[None]]] = deque()

    def has(self, size: int, own: int = 0) -> bool:
        """Whether a request that holds `own` may take `size` more at once."""
        return self.held + size <= self.limit or self.held == own

    def try_take(self, size: int, own: int = 0) -> bool:
        """Hold `size` bytes more if there is room for them now."""
        if self._waiting or not self.has(size, own):
            return False
        self.held += size
        return True

    async def take(self, size: int, own: int = 0) -> None:
        """Hold `size` bytes more. Raises EnvironmentLacks (503) after `wait_seconds`."""
        if self.try_take(size, own):
            return
        turn = (size, own, asyncio.get_running_loop().create_future())
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(self.wait_seconds):
                await turn[2]
        except BaseException as error:
            if turn[2].done() and not turn[2].cancelled():
                self.give(size)
            else:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                self._wake()
            if isinstance(error, TimeoutError):
                raise EnvironmentLacks(
                    f"{self.limit} bytes are held by other requests, the most that are allowed"
                ) from None
            raise

    def give(self, size: int) -> None:
        """Give bytes back."""
        self.held -= size
        self._wake()

    def _wake(self) -> None:
        while self._waiting and self.has(*self._waiting[0][:2]):
            size, _, turn = self._waiting.popleft()
            if not turn.cancelled():
                self.held += size
                turn.set_result(None)


class Memory:
    """What the requests of a service may hold: a quarter of `limit` bytes for bodies as they came, the rest
    to work on them.

    `reading` lets one large answer be put together at a time; once its size is known it is held in `work`.
    """

    def __init__(self, limit: int, wait_seconds: float = WAIT_SECONDS):
        self.reading = asyncio.Semaphore(1)
        self.bodies = Room(limit // 4, wait_seconds)
        self.work = Room(limit - limit // 4, wait_seconds)

    @asynccontextmanager
    async def body(
        self, request: Request, limit: int, weight: Callable[[bytes], int]
    ) -> AsyncIterator[bytes]:
        """The body, of `limit` bytes at most, and room for the bytes that it takes to work on it.

        Raises UserError (413) for a larger body, EnvironmentLacks (503) where no room was free in time, and
        what `weight` raises.
        """
        parts: list[bytes] = []
        size = work = 0
        try:
            async for part in parts_of(request, limit):
                await self.bodies.take(len(part), own=size)
                size += len(part)
                parts.append(part)
            body = b"".join(parts)
            parts.clear()
            needed = weight(body)
            await self.work.take(needed)
            work = needed
            yield body
        finally:
            self.bodies.give(size)
            self.work.give(work)


class HeldResponse(Response):
    """A body for which room was taken, given back once it is sent: in parts, so that a slow reader's is not
    held twice."""

    def __init__(self, body: bytes, room: Room, media_type: str):
        super().__init__(body, media_type=media_type)
        self._room = room
        self._size = len(body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            for at in range(0, self._size, PART_BYTES):
                await send(
                    {"type": "http.response.body", "body": self.body[at : at + PART_BYTES], "more_body": True}
                )
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._room.give(self._size)


def declared_size(length: bytes) -> int:
    """Bytes that a Content-Length names, 0 where it names none. It may begin with more zeros than Python
    reads of a number."""
    digits = length.lstrip(b"0")[:20]
    return int(digits) if digits.isdigit() else 0


async def parts_of(request: Request, limit: int) -> AsyncIterator[bytes]:
    """The body piece by piece, read no further than the limit. Raises UserError (413) beyond it, and
    ClientDisconnect for a client that left."""
    declared = declared_size(request.headers.get("content-length", "").encode("latin-1"))
    if declared > limit:
        raise UserError(f"body of {declared} bytes; at most {limit} accepted", status=413)
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise UserError(f"body of more than {limit} bytes; at most {limit} accepted", status=413)
        yield part


async def read_body(request: Request, limit: int) -> bytes:
    """The body, read no further than the limit. Raises UserError (413) beyond it."""
    return b"".join([part async for part in parts_of(request, limit)])


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route that reads `model` from the body by itself."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema_of(model)}}}}


def binary_body(description: str) -> dict[str, Any]:
    """`openapi_extra` of a route that reads bytes."""
    schema = {"type": "string", "format": "binary"}
    content = {"application/octet-stream": {"schema": schema}}
    return {"requestBody": {"required": True, "description": description, "content": content}}


def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of a request, its definitions written out: OpenAPI looks for them elsewhere."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})

    def resolve(node: Any) -> Any:
        if isinstance(node, dict):
            if reference := node.get("$ref"):
                return resolve(definitions[reference.rpartition("/")[2]])
            return {key: resolve(value) for key, value in node.items()}
        return [resolve(item) for item in node] if isinstance(node, list) else node

    return resolve(schema)
