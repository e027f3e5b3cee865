"""The likelihood service over HTTP: REST for any trainer, server-sent events, and the live page."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import orjson
from anyio import to_thread
from fastapi import FastAPI, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse, HTMLResponse, Response
from fastapi.staticfiles import StaticFiles
from sse_starlette import EventSourceResponse, ServerSentEvent

from services.common.http.app import new_app
from services.common.http.bodies import HeldResponse, Memory, binary_body, json_body
from services.common.http.faults import WITH_BODY, described, text_answer
from services.common.http.pages import CONTENT_POLICY
from services.likelihood.exports.mirrors import Mirroring
from services.likelihood.exports.prometheus import ServiceMetrics
from services.likelihood.records import (
    MAX_COUNT,
    MAX_STEP,
    EventRecord,
    RunInfo,
    StepReceipt,
    StepRecord,
    StoredStep,
    TrajectoryRecord,
    parsed,
)
from services.likelihood.rest.answers import Alarm, Phase, Series, StoredEvent, Summary, TokensReceipt
from services.likelihood.rest.control_routes import add_control_routes
from services.likelihood.rest.paths import Run, Step
from services.likelihood.rest.prompt_routes import add_prompt_routes
from services.likelihood.rest.run_routes import add_run_routes
from services.likelihood.rest.sample_routes import add_sample_routes
from services.likelihood.service import LikelihoodService
from services.likelihood.store.base import LikelihoodStore, NotStored
from services.likelihood.wire.npz import unpacked_size
from services.likelihood.wire.tokens import unpack_tokens
from services.settings import MonitorRules

MAX_STEP_BYTES = 32 << 20
MAX_EVENT_BYTES = 64 << 10
MAX_TOKEN_BYTES = 512 << 20
MAX_POINTS = 20_000
MEMORY_BYTES = 1 << 30
PARSED = 24
"""Bytes that a byte of JSON may take once it is read: small objects and short strings (measured: 24 for
actions without documents)."""
THREADS = 8
"""That read and write the store. More would take turns with the event loop for the interpreter, each with a
page cache of its own."""
STATIC = Path(__file__).parents[1] / "static"
SHELL = ("services.common.http", "static")
"""Package and folder of what the pages of all services share."""
OF_A_RUN = described(404)


def parsed_size(body: bytes) -> int:
    """Bytes that reading this JSON may take."""
    return PARSED * len(body)


def unpacked_tokens_size(body: bytes) -> int:
    """Bytes that checking these token arrays may take: as they come, and of the kept types."""
    return 3 * unpacked_size(body)


@asynccontextmanager
async def few_threads(app: FastAPI) -> AsyncIterator[None]:
    """Bound the threads that routes run in, for as long as the application runs."""
    to_thread.current_default_thread_limiter().total_tokens = THREADS
    yield


def create_app(
    store: LikelihoodStore,
    token: str | None = None,
    rules: MonitorRules | None = None,
    mirroring: Mirroring | None = None,
    memory_bytes: int = MEMORY_BYTES,
) -> FastAPI:
    """The service on a store. With a token, everything but health needs it (services.common.http.gate).

    memory_bytes: what requests in flight may hold together (services.common.http.bodies.Memory).
    """
    service = LikelihoodService(store, rules, mirroring)
    seen = ServiceMetrics(service)
    memory = Memory(memory_bytes)
    app = new_app(
        "Unspiral likelihood service",
        __doc__,
        "Unspiral likelihood: API",
        "Likelihood service: API",
        token,
        seen.refused,
        few_threads,
    )
    app.state.service = service
    app.mount("/static", StaticFiles(directory=STATIC, packages=[SHELL]), name="static")

    async def read(load: Callable[[], bytes], media_type: str) -> Response:
        """An answer that may be large: read while no other is, and held within the memory until it is
        sent."""
        async with memory.reading:
            body = await run_in_threadpool(load)
            await memory.work.take(len(body))
        return HeldResponse(body, memory.work, media_type)

    @app.post(
        "/v1/runs/{run}/steps",
        response_model=StepReceipt,
        openapi_extra=json_body(StepRecord),
        responses=WITH_BODY | described(409),
    )
    async def post_step(run: Run, request: Request) -> Any:
        """Store one step; the first post makes the run. The same step and attempt may be posted in parts and
        more than once."""
        started = time.perf_counter()
        async with memory.body(request, MAX_STEP_BYTES, parsed_size) as body:
            receipt = await run_in_threadpool(lambda: service.put_step(run, parsed(StepRecord, body)))
        seen.stored(receipt.stored, time.perf_counter() - started)
        return receipt

    @app.post(
        "/v1/runs/{run}/events",
        status_code=201,
        openapi_extra=json_body(EventRecord),
        responses=WITH_BODY,
    )
    async def post_event(run: Run, request: Request) -> dict[str, str]:
        """Note something that happened in a run, for the page and for later."""
        async with memory.body(request, MAX_EVENT_BYTES, parsed_size) as body:
            await run_in_threadpool(lambda: service.put_event(run, parsed(EventRecord, body)))
        return {"run": run}

    @app.put(
        "/v1/runs/{run}/steps/{step}/tokens",
        status_code=201,
        openapi_extra=binary_body("npz: uid, offsets, token_ids, action_ids, logp_old (numpy.savez)"),
        responses=WITH_BODY | described(409),
    )
    async def put_tokens(
        run: Run, step: Step, request: Request, attempt: Annotated[int, Query(ge=0, le=MAX_COUNT)] = 0
    ) -> TokensReceipt:
        """Keep the token arrays of a step (npz: uid, offsets, token_ids, action_ids, logp_old), those of the
        newest steps only.

        Identifiers are 32-bit integers, actions 16-bit; other arrays hold one number per token or
        trajectory."""
        async with memory.body(request, MAX_TOKEN_BYTES, unpacked_tokens_size) as body:

            def keep() -> int:
                rows = len(unpack_tokens(body))
                store.put_tokens(run, step, attempt, body)
                return rows

            rows = await run_in_threadpool(keep)
        return TokensReceipt(
            run=run, step=step, attempt=attempt, trajectories=rows, kept_steps=store.token_steps
        )

    @app.get(
        "/v1/runs/{run}/steps/{step}/tokens",
        response_class=Response,
        responses=OF_A_RUN | text_answer("application/octet-stream"),
    )
    async def get_tokens(run: Run, step: Step) -> Response:
        """The npz body of a step; 404 once it is no longer among the newest."""

        def load() -> bytes:
            body = store.get_tokens(run, step)
            if body is None:
                kept = f"the newest {store.token_steps} steps are kept"
                raise NotStored(f"run {run}: no token arrays of step {step}; {kept}")
            return body

        return await read(load, "application/octet-stream")

    @app.get("/v1/runs")
    def runs(limit: Annotated[int, Query(ge=1, le=10_000)] = 1000) -> list[RunInfo]:
        """The runs, the latest updated first."""
        return store.runs(limit)

    @app.get("/v1/runs/{run}/summary", response_model=Summary, responses=OF_A_RUN)
    def summary(run: Run) -> Any:
        """The run, its phase, its latest metrics and the alarms that stand."""
        return service.summary(run)

    @app.get("/v1/runs/{run}/series", response_model=Series, responses=OF_A_RUN)
    async def series(
        run: Run,
        names: Annotated[
            str | None, Query(description="metric names, separated by commas; all if left out")
        ] = None,
        first: Annotated[int | None, Query(ge=0, le=MAX_STEP)] = None,
        last: Annotated[int | None, Query(ge=0, le=MAX_STEP)] = None,
        points: Annotated[int, Query(ge=2, le=MAX_POINTS)] = 1000,
    ) -> Response:
        """Curves: the value of each step, or mean, least and largest of each bucket of `stride` steps where
        there are more than `points`.

        Of many curves there are fewer points each: 500,000 over all."""
        chosen = [n for n in names.split(",") if n] if names is not None else None
        return await read(
            lambda: orjson.dumps(service.series(run, chosen, first, last, points)), "application/json"
        )

    @app.get("/v1/runs/{run}/phase", response_model=Phase, responses=OF_A_RUN)
    def phase(run: Run) -> Any:
        """The phase now, since when, the bands of phases so far, and the rules that cannot judge the run
        yet."""
        return service.judged(run)

    @app.get("/v1/runs/{run}/alarms", response_model=list[Alarm], responses=OF_A_RUN)
    def alarms(run: Run) -> Any:
        """All alarms of the run; `cleared` is null for those that stand."""
        store.info(run)
        return store.alarms(run)

    @app.get("/v1/runs/{run}/events", response_model=list[StoredEvent], responses=OF_A_RUN)
    def events(
        run: Run,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
        kind: Annotated[str | None, Query(max_length=100, description="one kind; all if left out")] = None,
    ) -> Any:
        """The newest events, oldest first."""
        return store.events(run, limit, kind)

    @app.get("/v1/runs/{run}/steps", responses=OF_A_RUN)
    def steps(
        run: Run,
        first: Annotated[int, Query(ge=0, le=MAX_STEP)] = 0,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> list[StoredStep]:
        """Stored steps from `first` on, without their trajectories; fewer than `limit` where they hold many
        metrics."""
        return service.steps(run, first, limit)

    @app.get(
        "/v1/runs/{run}/steps/{step}/trajectories", response_model=list[TrajectoryRecord], responses=OF_A_RUN
    )
    async def trajectories(run: Run, step: Step) -> Response:
        """The trajectories of a step."""
        return await read(
            lambda: orjson.dumps(store.trajectories(run, step), default=vars), "application/json"
        )

    @app.get(
        "/v1/runs/{run}/stream",
        response_class=EventSourceResponse,
        responses=OF_A_RUN | text_answer("text/event-stream"),
    )
    async def stream(run: Run, request: Request) -> EventSourceResponse:
        """Server-sent events: `step`, `samples`, `alarm`, `cleared`, `event`, `about`; `reset` asks the
        listener to read everything anew."""
        await run_in_threadpool(store.info, run)
        service.check_listeners()
        return EventSourceResponse(_events(service, run, request), ping=15)

    @app.get("/v1/stream", response_class=EventSourceResponse, responses=text_answer("text/event-stream"))
    async def stream_all(request: Request) -> EventSourceResponse:
        """The same for all runs, those to come included."""
        service.check_listeners()
        return EventSourceResponse(_events(service, None, request), ping=15)

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:  # on the event loop: the threads may all wait for the store
        """The process is up."""
        return {"status": "ok"}

    @app.get("/readyz")
    def readyz() -> dict[str, str]:
        """The store answers; 503 if it does not."""
        store.ping()
        return {"status": "ready"}

    @app.get("/metrics", response_class=Response, responses=text_answer())
    def metrics() -> Response:
        """Prometheus: the service's own counters, and the latest value of each metric of the runs that are
        alive."""
        return Response(seen.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    add_run_routes(app, service, memory)
    add_control_routes(app, store, token)
    add_sample_routes(app, service, memory, read, STATIC)
    add_prompt_routes(app, store, read, STATIC)

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    def page() -> FileResponse:
        return FileResponse(
            STATIC / "live.html",
            headers={"Content-Security-Policy": CONTENT_POLICY, "Cache-Control": "no-cache"},
        )

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
