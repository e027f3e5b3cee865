"""The likelihood service over HTTP: REST for any trainer, server-sent events, and the live page."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

import fastapi
import orjson
from fastapi import Depends, FastAPI, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from pydantic import ValidationError
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.exceptions import HTTPException

from services.common.http.auth import TokenGate
from services.common.http.bodies import json_body, read_body
from services.common.http.errors import OneLineError
from services.common.http.pages import CONTENT_POLICY, docs_page
from services.likelihood.exports.mirrors import Mirroring
from services.likelihood.exports.prometheus import ServiceMetrics
from services.likelihood.records import (
    MAX_COUNT,
    MAX_STEP,
    EventRecord,
    LikelihoodError,
    RunInfo,
    StepReceipt,
    StepRecord,
    StoredStep,
    TrajectoryRecord,
    check_run_name,
    one_line,
)
from services.likelihood.service import LikelihoodService
from services.likelihood.stopping import AnswerWhenStopped
from services.likelihood.store.base import LikelihoodStore
from services.likelihood.tokens import unpack_tokens
from services.settings import MonitorRules

MAX_STEP_BYTES = 32 << 20
MAX_TOKEN_BYTES = 512 << 20
MAX_POINTS = 20_000
STATIC = Path(__file__).parent / "static"


def _named(run: str) -> str:
    return check_run_name(run)


Run = Annotated[str, Depends(_named)]
Step = Annotated[int, fastapi.Path(ge=0, le=MAX_STEP)]


def create_app(
    store: LikelihoodStore,
    token: str | None = None,
    rules: MonitorRules | None = None,
    mirroring: Mirroring | None = None,
) -> FastAPI:
    """The service on a store. With a token, everything but health needs it (services.common.http.auth)."""
    service = LikelihoodService(store, rules, mirroring)
    seen = ServiceMetrics(service)
    app = FastAPI(
        title="Unspiral likelihood service", version="1", description=__doc__, docs_url=None, redoc_url=None
    )
    app.state.service = service
    app.add_middleware(TokenGate, token=token)
    app.add_middleware(AnswerWhenStopped)  # the last added is the outermost
    app.mount("/static", StaticFiles(directory=STATIC), name="static")

    @app.exception_handler(OneLineError)
    async def _mistake(request: Request, error: OneLineError) -> JSONResponse:
        seen.refused(error.status)
        return JSONResponse({"detail": str(error)}, error.status)

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        return JSONResponse(
            {
                "detail": f"{'.'.join(str(p) for p in first['loc'][1:])}: {first['msg']} (got {str(first.get('input'))[:60]!r})"
            },
            422,
        )

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(
            {"detail": f"{request.method} {request.url.path}: {error.detail}"},
            error.status_code,
            error.headers,
        )

    @app.exception_handler(Exception)
    async def _broken(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": f"internal error: {type(error).__name__}"}, 500)

    @app.post("/v1/runs/{run}/steps", response_model=StepReceipt, openapi_extra=json_body(StepRecord))
    async def post_step(run: Run, request: Request) -> Any:
        """Store one step; the first post makes the run. The same step and attempt may be posted in parts and more than once."""
        started, body = time.perf_counter(), await read_body(request, MAX_STEP_BYTES)
        receipt = await run_in_threadpool(lambda: service.put_step(run, parsed(StepRecord, body)))
        seen.stored(receipt.stored, time.perf_counter() - started)
        return receipt

    @app.post("/v1/runs/{run}/events", status_code=201, openapi_extra=json_body(EventRecord))
    async def post_event(run: Run, request: Request) -> dict[str, str]:
        """Note something that happened in a run, for the page and for later."""
        body = await read_body(request, MAX_STEP_BYTES)
        await run_in_threadpool(lambda: service.put_event(run, parsed(EventRecord, body)))
        return {"run": run}

    @app.put("/v1/runs/{run}/steps/{step}/tokens", status_code=201)
    async def put_tokens(
        run: Run, step: Step, request: Request, attempt: Annotated[int, Query(ge=0, le=MAX_COUNT)] = 0
    ) -> dict[str, Any]:
        """Keep the token arrays of a step (npz: uid, offsets, token_ids, action_ids, logp_old), those of the newest steps only."""
        body = await read_body(request, MAX_TOKEN_BYTES)

        def keep() -> int:
            rows = len(unpack_tokens(body))
            store.put_tokens(run, step, attempt, body)
            return rows

        rows = await run_in_threadpool(keep)
        return {
            "run": run,
            "step": step,
            "attempt": attempt,
            "trajectories": rows,
            "kept_steps": store.token_steps,
        }

    @app.get("/v1/runs/{run}/steps/{step}/tokens", response_class=Response)
    def get_tokens(run: Run, step: Step) -> Response:
        """The npz body of a step; 404 once it is no longer among the newest."""
        body = store.get_tokens(run, step)
        if body is None:
            return JSONResponse(
                {
                    "detail": f"run {run}: no token arrays of step {step}; the newest {store.token_steps} steps are kept"
                },
                404,
            )
        return Response(body, media_type="application/octet-stream")

    @app.get("/v1/runs")
    def runs() -> list[RunInfo]:
        """All runs, the latest updated first."""
        return store.runs()

    @app.get("/v1/runs/{run}/summary")
    def summary(run: Run) -> dict[str, Any]:
        """The run, its phase, its latest metrics and the alarms that stand."""
        return service.summary(run)

    @app.get("/v1/runs/{run}/series")
    def series(
        run: Run,
        names: Annotated[
            str | None, Query(description="metric names, separated by commas; all if left out")
        ] = None,
        first: Annotated[int | None, Query(ge=0, le=MAX_STEP)] = None,
        last: Annotated[int | None, Query(ge=0, le=MAX_STEP)] = None,
        points: Annotated[int, Query(ge=2, le=MAX_POINTS)] = 1000,
    ) -> Response:
        """Curves: the value of each step, or mean, least and largest of each bucket of `stride` steps where there are more than `points`."""
        chosen = [n for n in names.split(",") if n] if names is not None else None
        return Response(
            orjson.dumps(service.series(run, chosen, first, last, points)), media_type="application/json"
        )

    @app.get("/v1/runs/{run}/phase")
    def phase(run: Run) -> dict[str, Any]:
        """The phase now, since when, and the bands of phases so far."""
        return service.phase(run)

    @app.get("/v1/runs/{run}/alarms")
    def alarms(run: Run) -> list[dict[str, Any]]:
        """All alarms of the run; `cleared` is null for those that stand."""
        store.info(run)
        return store.alarms(run)

    @app.get("/v1/runs/{run}/events")
    def events(run: Run, limit: Annotated[int, Query(ge=1, le=10_000)] = 1000) -> list[dict[str, Any]]:
        """The newest events, oldest first."""
        return store.events(run, limit)

    @app.get("/v1/runs/{run}/steps")
    def steps(
        run: Run,
        first: Annotated[int, Query(ge=0, le=MAX_STEP)] = 0,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> list[StoredStep]:
        """Stored steps from `first` on, without their trajectories."""
        return store.steps(run, first, MAX_STEP, limit)

    @app.get("/v1/runs/{run}/steps/{step}/trajectories", response_model=list[TrajectoryRecord])
    def trajectories(run: Run, step: Step) -> Response:
        """The trajectories of a step."""
        return Response(
            orjson.dumps(store.trajectories(run, step), default=vars), media_type="application/json"
        )

    @app.get("/v1/runs/{run}/stream")
    async def stream(run: Run, request: Request) -> EventSourceResponse:
        """Server-sent events: `step`, `alarm`, `cleared`, `event`; `reset` asks the listener to read everything anew."""
        await run_in_threadpool(store.info, run)
        return EventSourceResponse(_events(service, run, request), ping=15)

    @app.get("/v1/stream")
    async def stream_all(request: Request) -> EventSourceResponse:
        """The same for all runs, those to come included."""
        return EventSourceResponse(_events(service, None, request), ping=15)

    @app.get("/healthz")
    def healthz() -> dict[str, str]:
        """The process is up."""
        return {"status": "ok"}

    @app.get("/readyz")
    def readyz() -> dict[str, str]:
        """The store answers; 503 if it does not."""
        store.ping()
        return {"status": "ready"}

    @app.get("/metrics", response_class=Response)
    def metrics() -> Response:
        """Prometheus: the service's own counters, and the latest value of each metric of the runs that are alive."""
        return Response(seen.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    def page() -> FileResponse:
        return FileResponse(
            STATIC / "live.html",
            headers={"Content-Security-Policy": CONTENT_POLICY, "Cache-Control": "no-cache"},
        )

    @app.get("/docs", response_class=HTMLResponse, include_in_schema=False)
    def docs() -> HTMLResponse:
        return docs_page("Unspiral likelihood: API", "Likelihood service: API")

    return app


async def _events(
    service: LikelihoodService, run: str | None, request: Request
) -> AsyncIterator[ServerSentEvent]:
    listener = service.listen(run)
    try:
        yield ServerSentEvent(event="hello", data=json.dumps({"run": run}))
        while not await request.is_disconnected():
            try:
                kind, data = await asyncio.wait_for(listener.queue.get(), 5)
            except TimeoutError:
                continue
            yield ServerSentEvent(event=kind, data=orjson.dumps(data).decode(), id=str(data.get("step", "")))
    finally:
        service.leave(run, listener)


def parsed(model: type, body: bytes) -> Any:
    try:
        return model.model_validate_json(body)
    except ValidationError as e:
        raise LikelihoodError(one_line(e)) from e
