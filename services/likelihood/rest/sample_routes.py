"""The microscope over HTTP: trajectories token by token, and the page that shows them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import orjson
from fastapi import FastAPI, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse, HTMLResponse, Response

from services.common.http.bodies import Memory, json_body
from services.common.http.faults import WITH_BODY, described
from services.common.http.pages import CONTENT_POLICY
from services.likelihood.microscope.grid import MOST_GROUPS, Filters, Order, StepSamples, Which, step_samples
from services.likelihood.microscope.record import SampledTrajectory, SamplesReceipt, SamplesRecord
from services.likelihood.records import parsed
from services.likelihood.rest.answers import SampledStep
from services.likelihood.rest.paths import Run, Step
from services.likelihood.service import LikelihoodService

MAX_SAMPLES_BYTES = 32 << 20
PARSED = 24
"""Bytes that a byte of JSON may take once it is read."""
MAX_SEARCHED = 200
Read = Callable[[Callable[[], bytes], str], Awaitable[Response]]
"""Makes an answer that may be large, while no other is made."""
JSON = "application/json"


def add_sample_routes(
    app: FastAPI, service: LikelihoodService, memory: Memory, read: Read, static: Path
) -> None:
    """Add what concerns sampled trajectories, and the page of a step."""
    store = service.store

    @app.post(
        "/v1/runs/{run}/steps/{step}/samples",
        response_model=SamplesReceipt,
        openapi_extra=json_body(SamplesRecord),
        responses=WITH_BODY | described(409),
    )
    async def post_samples(run: Run, step: Step, request: Request) -> Any:
        """Keep trajectories of a step token by token, for the page of that step. Of how many steps is the
        service's setting. They change no metric; a step may be posted in parts and more than once."""
        async with memory.body(request, MAX_SAMPLES_BYTES, lambda body: PARSED * len(body)) as body:

            def keep() -> SamplesReceipt:
                record = parsed(SamplesRecord, body)
                stored = store.put_samples(run, step, record.attempt, record.trajectories)
                if stored:
                    service.publish(run, "samples", {"step": step, "stored": stored})
                kept = store.sample_steps
                return SamplesReceipt(
                    run=run, step=step, attempt=record.attempt, stored=stored, kept_steps=kept
                )

            return await run_in_threadpool(keep)

    @app.get("/v1/runs/{run}/steps/{step}/samples", response_model=StepSamples, responses=described(404))
    async def samples(
        run: Run,
        step: Step,
        which: Which | None = None,
        source: Annotated[str | None, Query(max_length=200, description="one data source")] = None,
        text: Annotated[
            str | None, Query(max_length=MAX_SEARCHED, description="stands in the trajectory; any case")
        ] = None,
        order: Order = "mixed",
        rule: Annotated[str | None, Query(max_length=100, description="rule of an alarm")] = None,
        limit: Annotated[int, Query(ge=1, le=MOST_GROUPS, description="groups")] = 100,
    ) -> Response:
        """The trajectories of a step that are kept token by token: their groups, and numbers of each. None
        where the step has none."""
        filters = Filters(which=which, source=source, text=text, order=order, rule=rule, limit=limit)
        return await read(lambda: step_samples(store, run, step, filters).model_dump_json().encode(), JSON)

    @app.get(
        "/v1/runs/{run}/steps/{step}/samples/full",
        response_model=list[SampledTrajectory],
        responses=described(404),
    )
    async def full_samples(
        run: Run,
        step: Step,
        group: Annotated[str | None, Query(max_length=200, description="one group; all if left out")] = None,
    ) -> Response:
        """Those trajectories themselves, token by token."""

        def load() -> bytes:
            found = [t.model_dump_json().encode() for t in store.samples(run, step, group)]
            return b"[" + b",".join(found) + b"]"

        return await read(load, JSON)

    @app.get("/v1/runs/{run}/samples", response_model=list[SampledStep], responses=described(404))
    async def sampled_steps(run: Run) -> Response:
        """The steps of which trajectories are kept token by token, in order."""
        return await read(
            lambda: orjson.dumps(
                [{"step": step, "trajectories": n} for step, n in store.sampled_steps(run).items()]
            ),
            JSON,
        )

    @app.get("/runs/{run}/steps/{step}", response_class=HTMLResponse, include_in_schema=False)
    def step_page(run: Run, step: Step) -> FileResponse:
        return FileResponse(
            static / "step.html",
            headers={"Content-Security-Policy": CONTENT_POLICY, "Cache-Control": "no-cache"},
        )
