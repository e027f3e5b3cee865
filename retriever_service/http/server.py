"""The retrieval server: Search-R1's `/retrieve`, in all dialects of its forks, with health, metrics and
documentation.

Every error is JSON with a 4xx or 5xx status, because existing clients call `.json()` without a look at the
status.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Response
from starlette.datastructures import State
from starlette.exceptions import HTTPException

from retriever_service.dense.encoder import model_name
from retriever_service.http.mcp import mounted
from retriever_service.http.metrics import Metrics
from retriever_service.http.reloading import reloading
from retriever_service.http.routes import ALWAYS, ERROR_RESPONSES, add_routes
from retriever_service.http.service import Service
from retriever_service.http.shard_side import add_shard_routes
from retriever_service.http.web import RetrieverApp, install_error_handlers
from retriever_service.index_folder.description import IndexSettings
from retriever_service.search import backends
from retriever_service.search.search_index import SearchIndex
from retriever_service.settings import ServerSettings
from services.common.http.bodies import Room
from services.common.http.pages import add_pages, shelled
from services.common.processes import signals

log = logging.getLogger("retriever_service")
_PAGE = Path(__file__).with_name("search.html")


def create_app(settings: ServerSettings, open_index: Callable[[], SearchIndex] | None = None) -> FastAPI:
    """The application. The index is loaded in the background once it runs: `/healthz` answers at once,
    `/readyz` when it is loaded.

    `open_index` gives the index; None opens `settings.index`.
    """
    bodies = Room(settings.max_bodies_bytes)
    service = Service(
        settings, open_index or (lambda: backends.open_index(settings, lambda line: service.tell(line)))
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loading = asyncio.create_task(_load_or_report(service, app.state))
        try:
            async with reloading(service):
                if app.state.load_first is not None:
                    with signals.ending_at_once():
                        await loading
                        await app.state.load_first()
                async with mounted(app, service, bodies) if settings.mcp else nullcontext():
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
    app.state.on_failure = None
    app.state.on_ready = None
    app.state.load_first = None
    install_error_handlers(app, service.metrics)
    add_pages(app, "Unspiral retriever: API", "Retriever: API")
    add_routes(app, service, bodies)
    add_shard_routes(app, service, bodies)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return Response(shelled(_PAGE), media_type="text/html")

    @app.get("/healthz", summary="Is the process up?")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/health", summary="As /healthz, under the name that rLLM's and FlashRAG's clients ask")
    async def health() -> dict[str, str | bool]:
        return {
            "status": "healthy",
            "index_loaded": service.index is not None,
            **_how(service),
            **_besides(service),
        }

    @app.get("/readyz", summary="Is the index loaded?", responses={503: ERROR_RESPONSES[503]})
    async def readyz() -> dict[str, Any]:
        if service.index is None:
            reason = (
                f"the index can't be opened: {service.failure}"
                if service.failure
                else f"the index is still loading: {service.loading}"
            )
            raise HTTPException(503, reason, {"Retry-After": "1"})
        info = service.index.info
        return {
            "status": "ready",
            "backend": info.backend,
            "passages": info.passages,
            "corpus_sha256": info.corpus_sha256,
            "settings": _public(info.settings),
            **_how(service),
            **_besides(service),
        }

    @app.get("/metrics", summary="Prometheus metrics", response_class=Response)
    async def metrics() -> Response:
        return Response(service.metrics.page(), media_type=Metrics.content_type)

    return app


def _how(service: Service) -> dict[str, str]:
    how = getattr(service.index, "how", "")  # an index of a user's own may lack what is optional
    return {"search": how} if how else {}


def _public(settings: IndexSettings) -> dict[str, Any]:
    """The settings, with the encoder's name in place of its folder: health is answered without a token, and
    folders of the server are not for everyone."""
    told: dict[str, Any] = {**settings}
    encoder: dict[str, Any] = told.get("encoder") or {}
    model = str(encoder.get("model") or "")
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:  # no name on the hub
        told["encoder"] = encoder | {"model": model_name(model)}
    return told


def _besides(service: Service) -> dict[str, str]:
    """What health has to say beside its state: what is loading, or why another index was not opened, or that
    a function of the user's fails."""
    if service.index is None and service.failure is None:
        return {"loading": service.loading}
    failure = service.reload_failure
    told = {} if failure is None else {"reload_failure": str(failure) or type(failure).__name__}
    failing = getattr(service.index, "failing", "")
    return told | ({"failing": failing} if failing else {})


async def _load_or_report(service: Service, told: State) -> None:
    await service.load()
    if service.failure is None:
        if told.on_ready is not None:
            told.on_ready()
        if failure := getattr(service.index, "failure", None):  # a function may be early
            log.warning(
                "retriever: the opening call failed, and a search is answered once a call works: %s", failure
            )
        return
    if told.on_failure is not None:  # whoever gave it says what is wrong
        told.on_failure(service.failure)
    else:
        log.error("the index can't be opened: %s", service.failure)
