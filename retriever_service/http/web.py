"""HTTP for the server: endpoints that take and give JSON bytes, errors that are always JSON, the optional
token.

`/retrieve` and `/rerank` are answered before FastAPI's own machinery, which costs more than a search in a
small index does; for everything else (and for the documentation of these two) FastAPI is used as usual.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from retriever_service.errors import (
    DeadlinePassed,
    Limit,
    QueueFull,
    RequestRefused,
    RetrieverUnavailable,
)
from retriever_service.http.forms.leniency import PARTIAL_HEADER, header_of
from retriever_service.http.forms.schemas import Reply, field_path
from retriever_service.http.metrics import Metrics
from retriever_service.settings import ServerSettings
from services.common.errors import UserError
from services.common.http.bodies import Room, declared_size
from services.common.http.faults import allowed_methods
from services.common.http.gate import HEALTH, Gate
from services.common.http.heads import HeadAsGet
from services.common.http.pages import no_such_page
from services.common.http.stopping import AnswerWhenStopped
from services.common.printing.messages import said

log = logging.getLogger("retriever_service")
OPEN_PATHS = HEALTH | {"/", "/health"}
"""Asked for no token beside health: the search page, which holds no data and sends the token that its user
types in."""
_JSON = (b"content-type", b"application/json")
Answer = Callable[[bytes, float], Awaitable[Reply]]
"""From the body of a request and the seconds it may take to the answer."""


class JsonEndpoint:
    """One POST route: reads the body within its limit, calls `answer`, and turns every error into JSON."""

    def __init__(
        self, path: str, answer: Answer, settings: ServerSettings, metrics: Metrics, bodies: Room
    ) -> None:
        self.path = path
        self._answer = answer
        self._settings = settings
        self._metrics = metrics
        self._bodies = bodies
        self._ok = metrics.requests.labels(path, "200")

    async def respond(self, scope: Scope, receive: Receive) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Status, headers and body of the answer."""
        held = 0
        try:
            content_type = b"application/json"  # a body that is not declared is read as JSON
            length = b""
            timeout = None
            for name, value in scope["headers"]:
                if name == b"content-type":
                    content_type = value
                elif name == b"content-length":
                    length = value
                elif name == b"x-timeout-seconds":
                    timeout = value
            if content_type != b"application/json":
                _require_json(content_type)
            limit = self._settings.request_timeout_seconds
            seconds = limit if timeout is None else min(limit, _seconds(timeout))
            until = time.monotonic() + seconds
            try:
                async with asyncio.timeout(seconds):
                    asked = await _read(receive, length, self._settings.max_body_bytes, self._bodies)
                held = len(asked)
            except TimeoutError:
                raise DeadlinePassed(f"body: it did not come whole within {seconds:g} s") from None
            body, changed, missing = await self._answer(asked, max(0.0, until - time.monotonic()))
            self._ok.inc()
            more = [header_of(changed)] if changed else []
            if missing:
                more.append((PARTIAL_HEADER, missing.encode("ascii", "replace")))
            return 200, [_JSON, (b"content-length", b"%d" % len(body)), *more], body
        except (Exception, asyncio.CancelledError) as error:
            # Cancelled is what uvicorn does to requests that are still in flight when the time to drain is
            # up: they get an answer.
            status, body, headers = error_answer(error)
            self._metrics.requests.labels(self.path, str(status)).inc()
            return status, [_JSON, (b"content-length", b"%d" % len(body)), *headers], body
        finally:
            self._bodies.give(held)


class BoundedBodies:
    """ASGI application before one that reads whole bodies without a limit: the other routes' limits hold for
    it too."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, bodies: Room) -> None:
        self._app = app
        self._limit = settings.max_body_bytes
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
        try:
            body = await _read(receive, declared, self._limit, self._bodies)
        except (RequestRefused, QueueFull, ClientDisconnect) as error:
            status, refusal, headers = error_answer(error)
            more = {name.decode(): value.decode() for name, value in headers}
            await Response(refusal, status, more, "application/json")(scope, receive, send)
            return
        waiting = [{"type": "http.request", "body": body, "more_body": False}]

        async def given() -> Message:
            return waiting.pop() if waiting else await receive()

        try:
            await self._app(scope, given, send)
        finally:
            self._bodies.give(len(body))


class RetrieverApp(FastAPI):
    """FastAPI with a short way to the endpoints in `fast` and the gate before all of them."""

    def __init__(self, *, token: str | None, **options) -> None:
        super().__init__(**options)
        self.fast: dict[str, JsonEndpoint] = {}
        self._gated = Gate(self._route, token, OPEN_PATHS, login=False, fault=error_body)
        self._slow = AnswerWhenStopped(HeadAsGet(super().__call__), error_body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._gated(scope, receive, send)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self.fast.get(scope["path"]) if scope["type"] == "http" else None
        if endpoint is None or scope["method"] != "POST":
            await self._slow(scope, receive, send)
            return
        status, headers, body = await endpoint.respond(scope, receive)
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def add_endpoint(self, endpoint: JsonEndpoint, **options) -> None:
        """Make a POST route of the endpoint; `options` are those of FastAPI's `add_api_route`."""
        self.fast[endpoint.path] = endpoint

        async def route(request: Request) -> Response:
            status, headers, body = await endpoint.respond(request.scope, request.receive)
            return Response(body, status, {k.decode(): v.decode() for k, v in headers})

        self.add_api_route(endpoint.path, route, methods=["POST"], response_class=Response, **options)


def error_body(detail: str, field: str | None = None, limit: Limit = None) -> bytes:
    """The JSON of every error: `detail`, `field` and `limit`, null where there is none
    (schemas.ErrorBody)."""
    return orjson.dumps({"detail": detail, "field": field, "limit": limit})


def error_answer(error: BaseException) -> tuple[int, bytes, list[tuple[bytes, bytes]]]:
    """Status, JSON body and extra headers that an error becomes."""
    if isinstance(error, RequestRefused):
        return error.status, error_body(error.detail, error.field, error.limit), []
    if isinstance(error, asyncio.CancelledError):
        return 503, error_body("the server is stopping"), [(b"retry-after", b"1")]
    if isinstance(error, ClientDisconnect):
        return 499, error_body("the client went away"), []
    if isinstance(error, QueueFull):
        return 503, error_body(str(error)), [(b"retry-after", b"%d" % error.retry_after_seconds)]
    if isinstance(error, RetrieverUnavailable):
        return 503, error_body(str(error)), [(b"retry-after", b"1")]
    if isinstance(error, DeadlinePassed):
        return error.status, error_body(str(error)), []
    if type(error) is UserError:  # of the corpus: a line that no check at the start has read
        return 500, error_body(str(error)), []
    # All others may name files and settings of the server, which are no client's business.
    log.error("request failed", exc_info=error)
    return 500, error_body(f"internal error: {type(error).__name__}"), []


def install_error_handlers(app: FastAPI, metrics: Metrics) -> None:
    """Make the errors of FastAPI's own routes JSON as well."""

    def counted(
        request: Request, status: int, body: bytes, headers: Mapping[str, str] | None = None
    ) -> Response:
        metrics.requests.labels(getattr(request.scope.get("route"), "path", "other"), str(status)).inc()
        return Response(body, status, headers, "application/json")

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        if page := no_such_page(request, error):
            counted(request, 404, b"")
            return page
        detail = str(error.detail)
        if error.status_code in (404, 405):
            detail = f"{request.method} {request.scope['path']}: {detail}; /docs lists the routes"
        headers = allowed_methods(request) if error.status_code == 405 else error.headers
        return counted(request, error.status_code, error_body(detail), headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        field = field_path(first["loc"][1:])
        return counted(request, 422, error_body(f"{field}: {said(first['msg'])}", field, first["type"]))

    @app.exception_handler(QueueFull)
    async def busy(request: Request, error: QueueFull) -> Response:
        status, body, headers = error_answer(error)
        return counted(request, status, body, {k.decode(): v.decode() for k, v in headers})

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        return counted(request, 500, error_body(f"internal error: {type(error).__name__}"))


async def _read(receive: Receive, declared: bytes, max_bytes: int, bodies: Room) -> bytes:
    """The whole body, held in `bodies`; a 413 as soon as it is known to be too large."""
    if (length := declared_size(declared)) > max_bytes:
        counts = f"{length} bytes, at most {max_bytes} are accepted"
        raise RequestRefused(413, f"body: {counts}", "body", max_bytes)
    parts: list[bytes] = []
    size = 0
    try:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            part = message.get("body", b"")
            if size + len(part) > max_bytes:
                limit = f"body: more than the {max_bytes} bytes that are accepted"
                raise RequestRefused(413, limit, "body", max_bytes)
            if not bodies.try_take(len(part), own=size):
                raise QueueFull(f"{bodies.limit} bytes of bodies are in flight, the most that are accepted")
            size += len(part)
            parts.append(part)
            if not message.get("more_body", False):
                return part if len(parts) == 1 else b"".join(parts)
    except BaseException:
        bodies.give(size)
        raise


def _require_json(content_type: bytes) -> None:
    """A 415 for what is not JSON in UTF-8. A request without the header does not come here: its body is read
    as JSON."""
    plain, *parameters = [part.strip().lower() for part in content_type.split(b";")]
    if plain != b"application/json" and not (plain.startswith(b"application/") and plain.endswith(b"+json")):
        given = content_type.decode("latin-1")[:80]
        raise RequestRefused(
            415, f"content-type: {given!r}, expected application/json", "content-type", "application/json"
        )
    for parameter in parameters:
        name, _, value = parameter.partition(b"=")
        if name.strip() == b"charset" and value.strip().strip(b'"') not in (b"utf-8", b"utf8"):
            given = value.strip().decode("latin-1")[:40]
            what = f"charset {given!r}, expected utf-8"
            raise RequestRefused(415, f"content-type: {what}", "content-type", "utf-8")


def _seconds(value: bytes) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        given = value.decode("latin-1")[:40]
        raise RequestRefused(
            422, f"X-Timeout-Seconds: {given!r} is no number above 0", "X-Timeout-Seconds", "a number above 0"
        )
    return seconds
