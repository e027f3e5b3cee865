"""HEAD, where load balancers send it: the answer to GET without its body."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

PATHS = frozenset({"/", "/healthz", "/readyz"})
"""Elsewhere HEAD is a 405: no costly answer, and no endless stream of events, is made in vain."""


class HeadAsGet:
    """ASGI middleware: the application behind it sees GET."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD" or scope["path"] not in PATHS:
            await self.app(scope, receive, send)
            return

        async def without_body(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self.app({**scope, "method": "GET"}, receive, without_body)
