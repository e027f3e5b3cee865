"""Requests that are still in flight when the server has waited long enough for them: an answer each, and no
traceback in the log."""

from __future__ import annotations

import asyncio

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.http.gate import Fault, plain_fault


class AnswerWhenStopped:
    """ASGI middleware, the outermost.

    A request that is cancelled gets a 503; a stream of events that breaks off is ended as HTTP wants it.
    """

    def __init__(self, app: ASGIApp, fault: Fault = plain_fault):
        self.app = app
        self.fault = fault

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun: Message | None = None
        ended = False

        async def noted(message: Message) -> None:
            nonlocal begun, ended
            if message["type"] == "http.response.start":
                begun = message
            elif message["type"] == "http.response.body":
                ended = not message.get("more_body", False)
            await send(message)

        try:
            await self.app(scope, receive, noted)
        except asyncio.CancelledError:
            # uvicorn cancels what outlives its grace, and would log each as a failure of the program.
            if scope["type"] == "http" and begun is None:
                headers = {"Retry-After": "1", "Connection": "close"}
                body = self.fault("the service is stopping", None, None)
                await Response(body, 503, headers, "application/json")(scope, receive, send)
        if begun is not None and not ended and all(name != b"content-length" for name, _ in begun["headers"]):
            await send({"type": "http.response.body", "body": b"", "more_body": False})
