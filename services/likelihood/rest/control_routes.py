"""A run's control plane, as far as the live page passes it on: what the run is doing, pause, resume, scale,
drain.

The run says where its control plane listens (`control` of its about record). Requests are passed on with this
service's own token, once the run has proved that it holds the same (services.common.peers). A service without
a token passes none on: whoever reaches it may read, and no more.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import fastapi
import httpx
from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool

from services.common.answers import object_of
from services.common.errors import EnvironmentLacks, UserError
from services.common.http.auth import TOKEN_VARIABLE
from services.common.http.bodies import json_body, read_body
from services.common.http.faults import WITH_BODY, described
from services.common.peers import asking
from services.common.validation import fitting
from services.likelihood.rest.paths import Run
from services.likelihood.store.base import LikelihoodStore

MAX_BODY_BYTES = 4096
WITHOUT_TOKEN = (
    f"The run has a token, and this service has none: set {TOKEN_VARIABLE} to the same value for this "
    "service too, or use `unspiral pause`, `resume` and `workers`."
)
PASSED_ON = WITH_BODY | described(404, 409, 504)
Worker = Annotated[
    str, fastapi.Path(max_length=64, pattern="^[A-Za-z0-9][A-Za-z0-9_.-]*$", description="a worker's id")
]


class ControlView(BaseModel):
    """A run's control plane, for the page."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    passes_on: bool
    """Whether this service has a token, so that it passes requests on."""
    status: dict[str, Any] | None = None
    """What `GET /v1/status` of the control plane answered."""
    problem: str | None = None
    """Why there is no status."""


class Passed(BaseModel):
    """What the run said to a request."""

    text: str
    target: int | None = None


def _whole(value: Any) -> Any:
    """4.0 is a whole number in JSON."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Workers(BaseModel):
    """How many rollout workers are wanted."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    n: Annotated[int, Field(ge=1, le=10_000, strict=True), BeforeValidator(_whole)] | Literal["all"]
    """A number, or "all": as many as the cluster has room for."""
    ahead: StrictBool = False
    """Also where the cluster has no room for so many yet."""


def add_control_routes(app: FastAPI, store: LikelihoodStore, token: str | None) -> None:
    """Add what the page's buttons ask for. token: this service's own, None for none."""

    async def send(run: str, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """What the run's control plane answered. Raises its refusal, and EnvironmentLacks without one."""
        peer = _peer(run, await run_in_threadpool(store.about, run))
        async with httpx.AsyncClient(timeout=asking.LOOK_SECONDS, trust_env=False) as http:
            if not await asking.is_there(http, peer, token):
                raise EnvironmentLacks(
                    f"run {run}: no control plane of it answers this service at {peer.url}; the run has "
                    "ended, listens to its own machine alone (control.host), or has another "
                    f"{TOKEN_VARIABLE}",
                    status=504,
                )
        answer = await asking.ask(peer.url, token, method, path, body)
        if not answer.is_success:
            raise asking.refusal(answer)
        said = object_of(answer.content)
        if not said:
            raise EnvironmentLacks(f"run {run}: what answers at {peer.url} is no control plane", status=504)
        return said

    async def passed(run: str, path: str, body: Any = None) -> Passed:
        if token is None:
            raise EnvironmentLacks(
                f"this service has no token, so it passes nothing on to a run: set {TOKEN_VARIABLE} for run "
                "and service, or use `unspiral pause`, `resume` and `workers`",
                status=403,
            )
        said = await send(run, "POST", path, body)
        return Passed(text=str(said.get("text", "done"))[:500], target=said.get("target"))

    @app.get("/v1/runs/{run}/control", responses=described(404))
    async def control(run: Run) -> ControlView:
        """What the run's control plane says it is doing; without one, why."""
        await run_in_threadpool(store.info, run)
        try:
            status = await send(run, "GET", "/v1/status")
        except (EnvironmentLacks, UserError) as e:
            problem = WITHOUT_TOKEN if token is None and e.status == 401 else str(e)
            return ControlView(passes_on=token is not None, problem=problem)
        return ControlView(passes_on=token is not None, status=status)

    @app.post("/v1/runs/{run}/control/pause", responses=PASSED_ON)
    async def pause(run: Run, request: Request) -> Passed:
        """Have the run begin no further step."""
        await read_body(request, MAX_BODY_BYTES)
        return await passed(run, "/v1/pause")

    @app.post("/v1/runs/{run}/control/resume", responses=PASSED_ON)
    async def resume(run: Run, request: Request) -> Passed:
        """Have the run go on after a pause."""
        await read_body(request, MAX_BODY_BYTES)
        return await passed(run, "/v1/resume")

    @app.post("/v1/runs/{run}/control/workers/scale", openapi_extra=json_body(Workers), responses=PASSED_ON)
    async def scale(run: Run, request: Request) -> Passed:
        """Have another number of rollout workers; the control plane says which are accepted."""
        body = await read_body(request, MAX_BODY_BYTES)
        expected = 'expected {"n": N} with N a whole number from 1 to 10000, or "all"'
        with fitting(lambda mistakes: UserError(expected)):
            wanted = Workers.model_validate_json(body)
        return await passed(run, "/v1/workers/scale", wanted.model_dump())

    @app.post("/v1/runs/{run}/control/workers/{worker}/drain", responses=PASSED_ON)
    async def drain(run: Run, worker: Worker, request: Request) -> Passed:
        """Let a worker finish what it runs, then end it."""
        await read_body(request, MAX_BODY_BYTES)
        return await passed(run, f"/v1/workers/{worker}/drain")


def _peer(run: str, about: dict[str, Any]) -> asking.Peer:
    place = about.get("control")
    if not place or about.get("ended"):
        raise EnvironmentLacks(f"run {run}: it serves no control plane now", status=409)
    return asking.Peer(run, place["id"], place["url"])
