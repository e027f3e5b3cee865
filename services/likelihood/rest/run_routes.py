"""Runs over HTTP: what a run says of itself, what people call it, and its end."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool

from services.common.http.bodies import Memory, json_body
from services.common.http.faults import WITH_BODY, described
from services.likelihood.records import RunInfo, parsed
from services.likelihood.rest.paths import Run
from services.likelihood.service import LikelihoodService
from services.likelihood.wire.about import AboutRecord, LabelsRecord

MAX_ABOUT_BYTES = 1 << 20
PARSED = 24
"""Bytes that a byte of JSON may take once it is read."""


def add_run_routes(app: FastAPI, service: LikelihoodService, memory: Memory) -> None:
    """Add what concerns a run as a whole."""

    @app.post(
        "/v1/runs/{run}/about", status_code=201, openapi_extra=json_body(AboutRecord), responses=WITH_BODY
    )
    async def post_about(run: Run, request: Request) -> dict[str, str]:
        """Set what the run says of itself: configuration, versions, commit, machine, times. Keys that are
        left out stay as they are; the first post makes the run."""
        async with memory.body(request, MAX_ABOUT_BYTES, lambda body: PARSED * len(body)) as body:
            await run_in_threadpool(lambda: service.put_about(run, _given(AboutRecord, body)))
        return {"run": run}

    @app.get("/v1/runs/{run}/about", response_model=AboutRecord, responses=described(404))
    def about(run: Run) -> Any:
        """What the run says of itself; null where it said nothing."""
        return service.store.about(run)

    @app.patch(
        "/v1/runs/{run}",
        response_model=RunInfo,
        openapi_extra=json_body(LabelsRecord),
        responses=WITH_BODY | described(404),
    )
    async def patch_run(run: Run, request: Request) -> Any:
        """Give a run another title, tags, or hide it. Its name, by which it is posted to, stays."""
        async with memory.body(request, MAX_ABOUT_BYTES, lambda body: PARSED * len(body)) as body:
            return await run_in_threadpool(lambda: service.put_labels(run, _given(LabelsRecord, body)))

    @app.delete("/v1/runs/{run}", responses=described(404))
    def delete_run(run: Run) -> dict[str, str]:
        """Delete a run: steps, curves, trajectories, alarms, events. It cannot be brought back. A run that
        goes on makes itself anew with its next step."""
        service.delete_run(run)
        return {"run": run}


def _given(model: type[AboutRecord] | type[LabelsRecord], body: bytes) -> dict[str, Any]:
    """The keys that stand in a body, checked."""
    return parsed(model, body).model_dump(exclude_unset=True)
