"""What a service answers when something is wrong: one line of JSON with a 4xx or 5xx, as its OpenAPI
description says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from services.common.errors import UnspiralError
from services.common.http.heads import PATHS as HEAD_PATHS
from services.common.http.pages import no_such_page
from services.common.printing.messages import said

CLIENT_LEFT = 499
WORDS = {
    400: "The request itself is malformed.",
    401: "A token is asked for and was not sent.",
    403: "A foreign page sent the request, or it came under a name that is not the service's.",
    404: "There is none of that name.",
    408: "Head or body did not come in time.",
    409: "What is there does not allow it.",
    413: "The body is too large.",
    422: "A value is wrong; the line names it and what is accepted.",
    429: "As many requests are in work as are accepted; the header Retry-After says when to try again.",
    431: "The head of the request is too large.",
    500: "An error of the service itself.",
    503: "The service cannot answer now; the header Retry-After says when to try again.",
    504: "The run does not answer.",
}


class Fault(BaseModel):
    """Every error."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    detail: str
    """What is wrong, in one line."""


@dataclass(frozen=True)
class FaultForm:
    """The JSON that a service writes its errors in."""

    model: type[BaseModel]
    write: Callable[[str, int, str | None], dict[str, Any]]
    """From an error's line, its status, and the part of the request that is wrong, where that is known."""


PLAIN = FaultForm(Fault, lambda detail, status, field: {"detail": detail})


def described(*statuses: int, model: type[BaseModel] = Fault) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route, or of a whole application, that may answer these errors. model: of the
    service's `FaultForm`."""
    return {status: {"description": WORDS[status], "model": model} for status in statuses}


def text_answer(kind: str = "text/plain") -> dict[int | str, dict[str, Any]]:
    """`responses` of a route whose answer is no JSON."""
    return {200: {"description": "Successful Response", "content": {kind: {"schema": {"type": "string"}}}}}


ANY_ROUTE = (400, 401, 403, 422, 431, 500, 503)
ALWAYS = described(*ANY_ROUTE)
"""What any route may answer."""
WITH_BODY = described(408, 413)
"""What a route that reads a body may answer besides."""


def allowed_methods(request: Request) -> dict[str, str]:
    """The header `Allow`, over all routes of the path; Starlette names those of the first alone."""
    matching = [r for r in request.app.routes if r.matches(request.scope)[0] is not Match.NONE]
    methods = {method for route in matching for method in getattr(route, "methods", None) or ()}
    if request.scope["path"] in HEAD_PATHS:
        methods.add("HEAD")
    return {"Allow": ", ".join(sorted(methods))}


def install_faults(app: FastAPI, refused: Callable[[int], None], form: FaultForm = PLAIN) -> None:
    """Make each error one line of JSON. `refused` is told the status, and counts it."""

    def refuse(
        detail: str, status: int, headers: Mapping[str, str] | None = None, field: str | None = None
    ) -> JSONResponse:
        refused(status)
        return JSONResponse(form.write(detail, status, field), status, headers)

    @app.exception_handler(UnspiralError)
    async def _mistake(request: Request, error: UnspiralError) -> JSONResponse:
        if not error.explained:
            raise error  # for `_broken`, and the log
        later = {"Retry-After": "1"} if error.status in (429, 503) else None
        return refuse(str(error), error.status, later, error.field)

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"][1:])
        given = str(first.get("input"))[:60]
        return refuse(f"{place}: {said(first['msg'])} (got {given!r})", 422, field=place)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        if page := no_such_page(request, error):
            refused(404)
            return page
        where = f"{request.method} {request.scope['path']}"
        headers = allowed_methods(request) if error.status_code == 405 else error.headers
        return refuse(f"{where}: {error.detail}", error.status_code, headers)

    @app.exception_handler(ClientDisconnect)
    async def _left(request: Request, error: ClientDisconnect) -> Response:
        refused(CLIENT_LEFT)
        return Response(status_code=CLIENT_LEFT)  # nobody reads it

    @app.exception_handler(Exception)
    async def _broken(request: Request, error: Exception) -> JSONResponse:
        return refuse(f"internal error: {type(error).__name__}", 500)
