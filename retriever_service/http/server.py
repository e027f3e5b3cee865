"""The retrieval server: Search-R1's `/retrieve`, in all dialects of its forks, with health, metrics and documentation.

Every error is JSON with a 4xx or 5xx status, because existing clients call `.json()` without a look at the status.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI, Response
from starlette.exceptions import HTTPException

from retriever_service import opening
from retriever_service.http.metrics import Metrics
from retriever_service.http.schemas import ErrorBody, RerankRequest, RetrieveRequest, RetrieveResponse
from retriever_service.http.service import Service
from retriever_service.http.web import JsonEndpoint, RetrieverApp, install_error_handlers
from retriever_service.index import Index
from retriever_service.settings import ServerSettings
from services.common import signals
from services.common.http.bodies import Room, schema_of
from services.common.http.pages import add_pages

log = logging.getLogger("retriever_service")
_PAGE = Path(__file__).with_name("search.html")
_ERRORS = {
    400: "The body is not JSON.",
    401: "A token is configured and was not sent.",
    413: "The body is too large.",
    403: "A foreign page sent the request, or it came under a name that is not the server's.",
    408: "Head or body did not come in time.",
    431: "The head of the request is too large.",
    415: "The body is declared as something else than JSON in UTF-8.",
    422: "A field is wrong; the answer names it and what is accepted.",
    500: "An error of the server itself.",
    503: "The index is loading, or the queue is full; the header Retry-After says when to try again.",
    504: "The deadline passed.",
}
ERROR_RESPONSES = {status: {"description": text, "model": ErrorBody} for status, text in _ERRORS.items()}


ALWAYS = {status: ERROR_RESPONSES[status] for status in (400, 401, 403, 422, 431, 500, 503)}


def create_app(settings: ServerSettings, open_index: Callable[[], Index] | None = None) -> FastAPI:
    """The application. The index is loaded in the background once it runs: `/healthz` answers at once, `/readyz` when it is loaded.

    `open_index` gives the index (anything with the attributes of `retriever_service.index.Index`); None opens `settings.index`.
    """
    bodies = Room(settings.max_bodies_bytes)
    service = Service(settings, open_index or (lambda: opening.open_index(settings)))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loading = asyncio.create_task(_load_or_report(service, app.state.on_failure))
        if app.state.load_first:
            with signals.ending_at_once():
                await loading
        try:
            yield
        finally:
            await asyncio.wait({loading}, timeout=settings.drain_seconds)
            loading.cancel()
            await service.stop()

    app = RetrieverApp(
        token=settings.token.get_secret_value() if settings.token is not None else None,
        title="Unspiral retriever",
        version="1",
        summary="Searches a corpus of passages. Speaks the interface of Search-R1 and its forks.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=ALWAYS,
    )
    app.state.service = service
    app.state.on_failure, app.state.load_first = None, False
    install_error_handlers(app, service.metrics)
    add_pages(app, "Unspiral retriever: API", "Retriever: API")
    app.add_endpoint(
        JsonEndpoint("/retrieve", service.retrieve, settings, service.metrics, bodies),
        summary="Search",
        description=(
            "The best passages for each query, best first. `queries` takes a list, `query` one string; a blank query finds nothing.\n\n"
            "```\ncurl -s localhost:8000/retrieve -H 'content-type: application/json' \\\n"
            '  -d \'{"queries": ["capital of Assyria"], "topk": 3, "return_scores": true}\'\n```'
        ),
        responses={
            200: {"model": RetrieveResponse, "description": "One list of passages for each query."},
            **ERROR_RESPONSES,
        },
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": schema_of(RetrieveRequest)}},
            }
        },
    )

    app.add_endpoint(
        JsonEndpoint("/rerank", service.rerank, settings, service.metrics, bodies),
        summary="Order given passages",
        description=(
            "Orders the passages of list i by query i with a cross-encoder, best first. Takes what `/retrieve` returns. "
            "404 where the server was started without `--reranker`."
        ),
        responses={
            200: {"model": RetrieveResponse, "description": "One list of passages for each query."},
            404: {"description": "No reranker is configured.", "model": ErrorBody},
            **ERROR_RESPONSES,
        },
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": schema_of(RerankRequest)}},
            }
        },
    )

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return Response(_PAGE.read_bytes(), media_type="text/html")

    @app.get("/healthz", summary="Is the process up?")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz", summary="Is the index loaded?", responses={503: ERROR_RESPONSES[503]})
    async def readyz() -> dict[str, str | int]:
        if service.index is None:
            reason = (
                f"the index can't be opened: {service.failure}"
                if service.failure
                else "the index is still loading"
            )
            raise HTTPException(503, reason, {"Retry-After": "1"})
        info = service.index.info
        return {
            "status": "ready",
            "backend": info.backend,
            "passages": info.passages,
            "corpus_sha256": info.corpus_sha256,
        }

    @app.get("/metrics", summary="Prometheus metrics", response_class=Response)
    async def metrics() -> Response:
        return Response(service.metrics.page(), media_type=Metrics.content_type)

    return app


async def _load_or_report(service: Service, on_failure: Callable[[Exception], None] | None) -> None:
    try:
        await service.load()
    except Exception as error:
        if on_failure:  # who gave it says what is wrong
            on_failure(error)
        else:
            log.error("the index can't be opened: %s", error)
