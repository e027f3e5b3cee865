"""HTTP for the server: bodies with a limit, errors that are always JSON, the optional token."""

from __future__ import annotations

import hmac
import logging

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from .metrics import Metrics
from .schemas import BadRequest, field_path

log = logging.getLogger("retriever_service")
OPEN_PATHS = frozenset({"/healthz", "/readyz"})


async def body_of(request: Request, max_bytes: int) -> bytes:
    """The body of a JSON request: 415 for another content type, 413 beyond the limit (refused as soon as it is known)."""
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json" and not (content_type.startswith("application/") and content_type.endswith("+json")):
        raise BadRequest(
            415, f"content-type: {content_type[:80]!r}, expected application/json", "content-type", "application/json"
        )
    declared = request.headers.get("content-length", "")
    parts, size = [], int(declared) if declared.isdigit() else 0
    if size <= max_bytes:
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > max_bytes:
                break
            parts.append(part)
        else:
            return parts[0] if len(parts) == 1 else b"".join(parts)
    raise BadRequest(413, f"body: more than the {max_bytes} bytes that are accepted", "body", max_bytes)


def error_response(request: Request, metrics: Metrics, status: int, body: dict, headers: dict | None = None) -> Response:
    """A JSON error, counted."""
    route = request.scope.get("route")
    metrics.requests.labels(getattr(route, "path", "other"), str(status)).inc()
    return Response(orjson.dumps(body), status, headers=headers, media_type="application/json")


def install_error_handlers(app: FastAPI, metrics: Metrics) -> None:
    """Make every error JSON."""

    @app.exception_handler(BadRequest)
    async def bad_request(request: Request, error: BadRequest) -> Response:
        return error_response(request, metrics, error.status, error.body)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        return error_response(request, metrics, error.status_code, {"detail": str(error.detail)}, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        field = field_path(first["loc"][1:])
        return error_response(
            request, metrics, 422, {"detail": f"{field}: {first['msg']}", "field": field, "limit": first["type"]}
        )

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return error_response(request, metrics, 499, {"detail": "the client went away"})

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        return error_response(request, metrics, 500, {"detail": f"internal error: {type(error).__name__}"})


def require_token(app: FastAPI, token: str) -> None:
    """Every route but the health ones wants `Authorization: Bearer TOKEN`."""
    expected = b"Bearer " + token.encode()

    class RequireToken:
        def __init__(self, inner: ASGIApp) -> None:
            self.inner = inner

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
                given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
                if not hmac.compare_digest(given, expected):
                    body = orjson.dumps(
                        {"detail": "a token is required: Authorization: Bearer TOKEN", "field": "authorization"}
                    )
                    answer = Response(body, 401, {"WWW-Authenticate": "Bearer"}, "application/json")
                    await answer(scope, receive, send)
                    return
            await self.inner(scope, receive, send)

    app.add_middleware(RequireToken)
