"""The control plane over HTTP: what a run is doing, how many workers it has, pause and resume. The same in
front of a run and of a gateway."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import fastapi
from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from pydantic import ValidationError

from services.common.errors import UserError
from services.common.http.app import new_app
from services.common.http.bodies import json_body, read_body
from services.common.http.faults import WITH_BODY, described, text_answer
from services.common.peers.proof import proof
from services.common.validation import fitting
from services.control.records import MAX_WORKERS, PAUSE_INSTEAD, Control, Done, RunStatus, Scale

MAX_BODY_BYTES = 4096
AWAY = described(504)
TO_A_RUN = AWAY | WITH_BODY | described(409)
SCALE_ACCEPTS = (
    f'expected {{"n": N}} with N a whole number from 1 to {MAX_WORKERS}, or "all", and optionally '
    '"ahead": true'
)
WORKER_STATES = ("starting", "waiting", "ready", "syncing", "draining", "failed")

Nonce = Annotated[
    str | None,
    fastapi.Query(pattern="^[0-9a-f]{32}$", description="32 hexadecimal digits, to be answered by a proof"),
]
Worker = Annotated[str, fastapi.Path(max_length=64, description="a worker's id, such as w0.1")]


def _no_scale(body: bytes, mistakes: ValidationError) -> UserError:
    given = body[:60].decode("utf-8", "replace") or "an empty body"
    none = any(mistake["type"] == "greater_than_equal" for mistake in mistakes.errors())
    return UserError(f"{SCALE_ACCEPTS}; got {given}" + (f"; {PAUSE_INSTEAD}" if none else ""))


def create_app(control: Control, token: str | None = None, id: str | None = None) -> FastAPI:
    """The control plane of `control`. With a token, everything but health needs it
    (services.common.http.gate).

    id: of a run, given back by the health check so that a gateway knows it again; a gateway has none.
    """
    seen = ControlMetrics()
    app = new_app(
        "Unspiral control plane",
        __doc__,
        "Unspiral control: API",
        "Control plane: API",
        token,
        lambda status: seen.refused.labels(str(status)).inc(),
    )

    @app.get("/v1/status", responses=AWAY)
    async def status() -> RunStatus:
        """What the run is doing; `state` is `no run` where none is."""
        return await control.status()

    @app.post("/v1/workers/scale", status_code=202, openapi_extra=json_body(Scale), responses=TO_A_RUN)
    async def scale(request: Request) -> Done:
        """Want another number of rollout workers. Answers at once: workers join when they hold the weights,
        and leave when they are idle.

        409 where the cluster cannot hold so many, unless `ahead` is true."""
        body = await read_body(request, MAX_BODY_BYTES)
        with fitting(partial(_no_scale, body)):
            wanted = Scale.model_validate_json(body)
        return await control.scale(wanted.n, wanted.ahead)

    @app.post("/v1/workers/{worker}/drain", status_code=202, responses=TO_A_RUN | described(404))
    async def drain(worker: Worker, request: Request) -> Done:
        """Let a worker finish what it runs, then end it; one fewer is wanted from now on. 404 for an unknown
        worker, 422 for the last one."""
        await read_body(request, MAX_BODY_BYTES)
        return await control.drain(worker)

    @app.post("/v1/pause", responses=TO_A_RUN)
    async def pause(request: Request) -> Done:
        """Begin no further step. The step in hand ends; workers stay, idle."""
        await read_body(request, MAX_BODY_BYTES)
        return await control.pause()

    @app.post("/v1/resume", responses=TO_A_RUN)
    async def resume(request: Request) -> Done:
        """Go on after a pause."""
        await read_body(request, MAX_BODY_BYTES)
        return await control.resume()

    @app.get("/healthz")
    async def healthz(request: Request, nonce: Nonce = None) -> dict[str, str]:
        """The process is up. `run`: the random id of the run that this serves; left out by a gateway.
        `proof`: to a nonce, that the run holds the token (services/common/peers/proof.py)."""
        about = {"status": "ok"} | ({"run": id} if id else {})
        if nonce and id and token:
            about["proof"] = proof(token, nonce, id, request.scope["server"])
        return about

    @app.get("/readyz", responses=AWAY)
    async def readyz() -> dict[str, str]:
        """Requests can be answered: the run's loop does, or for a gateway the cluster; 503 or 504 if not."""
        await control.ready()
        return {"status": "ready"}

    @app.get("/metrics", response_class=Response, responses=AWAY | text_answer())
    async def metrics() -> Response:
        """Prometheus: the run's state, its workers and its speed."""
        return Response(
            seen.text(await control.status()), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    @app.get("/", include_in_schema=False)
    async def root() -> RedirectResponse:
        return RedirectResponse("/docs")

    return app


class ControlMetrics:
    """Gauges, set from the run's status at each scrape."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.refused = Counter(
            "unspiral_control_refused", "Requests refused", ["status"], registry=self.registry
        )

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"unspiral_control_{name}", text, labels, registry=self.registry)

        self.run = gauge("run", "1 while a run is there")
        self.paused = gauge("paused", "1 while the run is paused")
        self.step = gauge("step", "Last step that was finished")
        self.steps = gauge("steps", "Steps of the whole run")
        self.version = gauge("policy_version", "Policy version of the learner")
        self.target = gauge("workers_target", "Rollout workers wanted")
        self.workers = gauge("workers", "Rollout workers in a state", "state")
        self.tokens = gauge("rollout_tokens_per_second", "Tokens written over the last 30 seconds, a second")
        self.restores = gauge("learner_restores", "Times that the learner was lost and restored")
        self.reach = gauge("reachable", "1 while a service that the run uses answers", "service")

    def text(self, status: RunStatus) -> bytes:
        self.run.set(status.state != "no run")
        self.paused.set(status.state == "paused")
        self.step.set(status.step)
        self.steps.set(status.steps or 0)
        self.version.set(status.version or 0)
        self.target.set(status.target)
        for state in WORKER_STATES:
            self.workers.labels(state).set(sum(w.state == state for w in status.workers))
        self.tokens.set(status.tokens_per_s or 0)
        self.restores.set(status.restores)
        self.reach.clear()  # without a run, there is nothing to be reached
        for name, reach in (("retriever", status.retriever), ("store", status.store)):
            if reach:
                self.reach.labels(name).set(reach.reachable)
        return generate_latest(self.registry)
