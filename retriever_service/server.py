"""The retrieval server: Search-R1's `/retrieve`, in all dialects of its forks, with health, metrics and documentation.

Every error is JSON with a 4xx or 5xx status, because existing clients call `.json()` without a look at the status.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import orjson
from fastapi import FastAPI, Request, Response
from pydantic import TypeAdapter
from starlette.exceptions import HTTPException

from .batcher import Batcher, Hits
from .errors import DeadlinePassed, QueueFull
from .index import Index
from .metrics import Metrics
from .schemas import BadRequest, ErrorBody, RetrieveRequest, RetrieveResponse, check_texts, check_topk, parse_body
from .settings import ServerSettings
from .web import body_of, error_response, install_error_handlers, require_token

log = logging.getLogger("retriever_service")
_RETRIEVE = TypeAdapter(RetrieveRequest)
_ERRORS = {
    400: "The body is not JSON.",
    413: "The body is too large.",
    415: "The body is not declared as JSON.",
    422: "A field is wrong; the answer names it and what is accepted.",
    503: "The index is loading, or the queue is full; the header Retry-After says when to try again.",
    504: "The deadline passed.",
}
ERROR_RESPONSES = {status: {"description": text, "model": ErrorBody} for status, text in _ERRORS.items()}


class Service:
    """The index of one application and its batcher; `index` is None until it is loaded."""

    def __init__(self, settings: ServerSettings, open_index: Callable[[], Index]) -> None:
        self.settings, self.metrics, self._open = settings, Metrics(), open_index
        self.index: Index | None = None
        self.batcher: Batcher | None = None
        self.failure: Exception | None = None

    def load(self) -> None:
        """Open the index and start its thread. A failure is kept in `failure` and raised."""
        settings = self.settings
        try:
            index = self._open()
        except Exception as error:
            self.failure = error
            raise
        self.metrics.passages.set(index.info.passages)
        self.batcher = Batcher(
            index.search,
            self.metrics,
            batch_size=settings.batch_size,
            batch_wait_ms=settings.batch_wait_ms,
            max_queued=settings.max_queued,
        )
        self.metrics.queued.set_function(lambda: self.batcher.queued)
        self.index = index

    def stop(self) -> None:
        if self.batcher and self.batcher.stop(self.settings.drain_seconds) and self.index:
            self.index.close()

    async def search(self, queries: list[str], topk: int, timeout_seconds: float) -> list[Hits]:
        """Hits of each query, blank queries getting none."""
        if self.batcher is None:
            raise QueueFull("the index is still loading")
        asked = [q for q in queries if q and not q.isspace()]
        found = iter(await self.batcher.submit(asked, topk, timeout_seconds) if asked else ())
        hits = [next(found) if q and not q.isspace() else [] for q in queries]
        self.metrics.queries.inc(len(queries))
        if empty := sum(not h for h in hits):
            self.metrics.empty.inc(empty)
        return hits


def encode_answer(hits: list[Hits], return_scores: bool) -> bytes:
    """The body of an answer, joined from documents that are JSON already."""
    if return_scores:
        rows = (b",".join([b'{"document":%b,"score":%b}' % (d, orjson.dumps(s)) for d, s in one]) for one in hits)
    else:
        rows = (b",".join([d for d, _ in one]) for one in hits)
    return b'{"result":[' + b",".join([b"[%b]" % row for row in rows]) + b"]}"


def deadline_of(request: Request, default: float) -> float:
    """Seconds that this request may take: the server's limit, or less if the client says so."""
    asked = request.headers.get("x-timeout-seconds")
    if asked is None:
        return default
    try:
        seconds = float(asked)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise BadRequest(
            422, f"X-Timeout-Seconds: {asked[:40]!r} is no number above 0", "X-Timeout-Seconds", "a number above 0"
        )
    return min(default, seconds)


def create_app(settings: ServerSettings, open_index: Callable[[], Index] | None = None) -> FastAPI:
    """The application. The index is loaded in the background once it runs: `/healthz` answers at once, `/readyz` when it is loaded.

    `open_index` gives the index (anything with `info`, `search`, `close` as `retriever_service.index.Index`); None opens `settings.index`.
    """
    service = Service(settings, open_index or (lambda: Index(settings.index, settings.corpus)))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loading = asyncio.create_task(asyncio.to_thread(_load_or_report, service, app.state.on_failure))
        try:
            yield
        finally:
            await asyncio.wait({loading})
            await asyncio.to_thread(service.stop)

    app = FastAPI(
        title="Unspiral retriever",
        version="1",
        summary="Searches a corpus of passages. Speaks the interface of Search-R1 and its forks.",
        lifespan=lifespan,
    )
    app.state.service = service
    app.state.on_failure = None
    install_error_handlers(app, service.metrics)
    if settings.token is not None:
        require_token(app, settings.token.get_secret_value())

    async def retrieve(request: Request) -> Response:
        started = time.perf_counter()
        body = await body_of(request, settings.max_body_bytes)
        asked: RetrieveRequest = parse_body(_RETRIEVE, body)
        queries = asked.queries
        if (queries is None) == (asked.query is None):
            given = "both are" if queries is not None else "neither is"
            raise BadRequest(
                422, f"queries: one of queries and query is expected, {given} given", "queries", "one of queries and query"
            )
        if queries is None:
            queries = [asked.query]
        check_texts(queries, "queries", settings.max_queries, settings.max_query_chars)
        topk = check_topk(asked.topk, settings.topk, settings.max_topk)
        timeout = deadline_of(request, settings.request_timeout_seconds)
        hits = await service.search(queries, topk, timeout) if queries else []
        answer = Response(encode_answer(hits, asked.return_scores), media_type="application/json")
        service.metrics.ok.inc()
        service.metrics.latency.observe(time.perf_counter() - started)
        return answer

    app.add_api_route(
        "/retrieve",
        retrieve,
        methods=["POST"],
        summary="Search",
        description=(
            "The best passages for each query, best first. `queries` takes a list, `query` one string; a blank query finds nothing.\n\n"
            "```\ncurl -s localhost:8000/retrieve -H 'content-type: application/json' \\\n"
            '  -d \'{"queries": ["capital of Assyria"], "topk": 3, "return_scores": true}\'\n```'
        ),
        responses={200: {"model": RetrieveResponse, "description": "One list of passages for each query."}, **ERROR_RESPONSES},
        openapi_extra={
            "requestBody": {"required": True, "content": {"application/json": {"schema": RetrieveRequest.model_json_schema()}}}
        },
        response_class=Response,
    )

    @app.get("/healthz", summary="Is the process up?")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz", summary="Is the index loaded?", responses={503: ERROR_RESPONSES[503]})
    async def readyz() -> dict[str, str | int]:
        if service.index is None:
            reason = f"the index can't be opened: {service.failure}" if service.failure else "the index is still loading"
            raise HTTPException(503, reason, {"Retry-After": "1"})
        info = service.index.info
        return {"status": "ready", "backend": info.backend, "passages": info.passages, "corpus_sha256": info.corpus_sha256}

    @app.get("/metrics", summary="Prometheus metrics", response_class=Response)
    async def metrics() -> Response:
        return Response(service.metrics.page(), media_type=Metrics.content_type)

    @app.exception_handler(QueueFull)
    async def queue_full(request: Request, error: QueueFull) -> Response:
        return error_response(
            request, service.metrics, 503, {"detail": str(error)}, {"Retry-After": str(error.retry_after_seconds)}
        )

    @app.exception_handler(DeadlinePassed)
    async def too_late(request: Request, error: DeadlinePassed) -> Response:
        return error_response(request, service.metrics, 504, {"detail": str(error)})

    return app


def _load_or_report(service: Service, on_failure: Callable[[Exception], None] | None) -> None:
    try:
        service.load()
    except Exception as error:
        log.error("the index can't be opened: %s", error)
        if on_failure:
            on_failure(error)
