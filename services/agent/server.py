"""A trained agent over HTTP, in the form of OpenAI's chat interface: any chat page can be put before it."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import fastapi
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from sse_starlette import EventSourceResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from services.agent.agent import Asked, Curves
from services.agent.answers import Told, about, finish_reason, message_of, token_logprobs, usage
from services.agent.metrics import AgentMetrics
from services.agent.places import Places
from services.agent.schemas import (
    FORM,
    ChatRequest,
    ErrorObject,
    Model,
    ModelList,
    error_object,
    parse_request,
)
from services.common.errors import EnvironmentLacks, UnspiralError, UserError, explains
from services.common.http.app import new_app
from services.common.http.bodies import json_body, read_body
from services.common.http.faults import described, text_answer
from services.common.http.gate import HEALTH
from services.common.http.pages import CONTENT_POLICY, shelled
from services.contracts import Trajectory
from services.rollout.errors import WorkerLostError
from services.rollout.worker.watching import Event, Restarted

T = TypeVar("T")
log = logging.getLogger(__name__)

MAX_BODY_BYTES = 1 << 20
"""Longest request: a conversation of a million characters, of which one message is read."""
PING_SECONDS = 15
"""A stream in which nothing is written for so long, as in a slow search, gets a comment: proxies end silent
connections."""
_PAGE = Path(__file__).with_name("ask.html")
PAGE_HEADERS = {"Content-Security-Policy": CONTENT_POLICY, "Cache-Control": "no-cache"}
OPEN_PATHS = HEALTH | {"/"}
"""Asked for no token beside health: the page to ask in, which holds no data and sends the token that its user
types in."""
TO_ASK = described(404, 408, 413, 429, 504, model=ErrorObject)
Name = Annotated[str, fastapi.Path(max_length=256, description="a name that /v1/models lists")]


@dataclass(frozen=True)
class ServiceLimits:
    """What all clients together may ask of an agent."""

    running: int = 8
    """Questions worked on at the same time."""
    waiting: int = 32
    """Questions that may wait; a further one gets a 429."""
    wait_seconds: float = 600.0
    """Longest wait for a place; after it a 503."""
    close_seconds: float = 20.0
    """Longest wait, at the end, for the engine to end."""


class Service:
    """The agent, which loads in the background, and what is told of it."""

    def __init__(self, agent: Asked, name: str, limits: ServiceLimits) -> None:
        self.agent = agent
        self.name = name
        self.limits = limits
        self.created = int(time.time())
        self.places = Places(limits.running, limits.waiting, limits.wait_seconds)
        self.metrics = AgentMetrics(self.places)
        self.ready = False
        self.failure: Exception | None = None
        """Why nothing will be answered any more."""
        self.on_failure: Callable[[], None] = lambda: None
        self.on_ready: Callable[[], None] = lambda: None

    async def load(self) -> None:
        """Start the agent; a failure is kept, and `on_failure` told."""
        try:
            await self.agent.start()
        except Exception as e:
            self.fail(e)
        else:
            self.ready = True
            self.on_ready()

    def fail(self, error: Exception) -> None:
        """Nothing will be answered any more."""
        self.ready = False
        self.failure = self.failure or error
        self.on_failure()

    def check(self) -> None:
        """Raises EnvironmentLacks where no question can be answered now."""
        if self.ready:
            try:
                self.agent.check()
            except WorkerLostError as e:
                self.fail(e)
        if self.failure is not None:
            # Its own text may name files, which are no client's business.
            raise EnvironmentLacks("the agent has failed, and its service ends")
        if not self.ready:
            raise EnvironmentLacks("the agent is loading")

    def model(self) -> Model:
        return Model(id=self.name, created=self.created)

    async def ask(self, asked: ChatRequest, watch: Callable[[Event], None]) -> Trajectory:
        """The answer to a request. Raises errors with the status that a client is to get."""
        began = time.monotonic()
        try:
            trajectory = await self.agent.ask(
                asked.question(),
                watch,
                temperature=asked.temperature or 0.0,
                most_tokens=asked.most_tokens(),
            )
        except WorkerLostError as e:
            self.fail(e)
            raise EnvironmentLacks("the engine has died, and its service ends") from e
        except TimeoutError as e:
            raise UnspiralError(str(e), status=504, explained=True) from e
        self.metrics.answered(trajectory, time.monotonic() - began)
        return trajectory


def create_app(
    agent: Asked,
    name: str,
    token: str | None = None,
    limits: ServiceLimits | None = None,
    curves: Curves | None = None,
) -> FastAPI:
    """The application. It starts the agent when it runs, and closes it in the end: `/healthz` answers at
    once, `/readyz` when the model is loaded. With a token, everything but health and the page
    needs it.

    name: the model's. curves: the way to those of its run."""
    service = Service(agent, name, limits or ServiceLimits())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loading = asyncio.create_task(service.load())
        try:
            yield
        finally:
            seconds = service.limits.close_seconds
            loading.cancel()
            await asyncio.wait({loading}, timeout=seconds)
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await agent.close()

    app = new_app(
        "Unspiral agent",
        __doc__,
        "Unspiral agent: API",
        "Agent: API",
        token,
        lambda status: service.metrics.refused.labels(str(status)).inc(),
        lifespan,
        FORM,
        OPEN_PATHS,
    )
    app.state.service = service

    @app.get("/v1/models")
    async def models() -> ModelList:
        """The models that can be asked: one."""
        return ModelList(data=[service.model()])

    @app.get("/v1/models/{model:path}", responses=described(404, model=ErrorObject))
    async def model(model: Name) -> Model:
        """One model by its name."""
        _check_name(service, model)
        return service.model()

    @app.post(
        "/v1/chat/completions",
        openapi_extra=_request_of(name),
        responses=TO_ASK | _completion(),
        response_class=Response,
    )
    async def chat(request: Request) -> Response:
        """Ask the agent the last user message. The answer is `content`; what was written before it
        `reasoning_content`, and each search with its documents a tool call in `searches`."""
        asked = parse_request(await read_body(request, MAX_BODY_BYTES), service.name)
        _check_name(service, asked.model)
        asked.question()  # before a place is taken
        service.check()
        async with AsyncExitStack() as place:
            await place.enter_async_context(service.places.one())
            if asked.stream:
                return _Stream(service, asked, place.pop_all())
            return JSONResponse(await _unless_left(request, _whole(service, asked)))

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """The process is up."""
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz() -> dict[str, str]:
        """The model is loaded; 503 if not."""
        service.check()
        return {"status": "ready"}

    @app.get("/metrics", response_class=Response, responses=text_answer())
    async def metrics() -> Response:
        """Prometheus: questions, tokens, searches, and how long answers take."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(shelled(_PAGE), headers=PAGE_HEADERS)

    @app.get("/curves", include_in_schema=False)
    async def its_curves() -> dict[str, str | None]:
        """For the page, which is open: where the run lies is told behind the token."""
        return {"url": curves.url, "command": curves.command} if curves else {}

    return app


def _request_of(name: str) -> dict[str, Any]:
    """The body of a chat, with the one name that it may hold."""
    body = json_body(ChatRequest)
    schema = body["requestBody"]["content"]["application/json"]["schema"]
    schema["properties"]["model"]["enum"] = [name]
    return body


def _completion() -> dict[int | str, dict[str, Any]]:
    """`responses` of a chat: a completion, or events."""
    content = {
        "application/json": {"schema": {"type": "object"}},
        "text/event-stream": {},
    }
    return {200: {"description": "A chat completion, or its chunks as events", "content": content}}


def _check_name(service: Service, name: str) -> None:
    if name != service.name:
        line = f"model: there is no {name[:60]!r}; {service.name!r} is served"
        raise UserError(line, status=404, field="model")


async def _whole(service: Service, asked: ChatRequest) -> dict[str, Any]:
    """The chat completion of a request."""
    told = Told()
    deltas: list[dict[str, Any]] = []

    def watch(event: Event) -> None:
        if isinstance(event, Restarted):
            deltas.clear()
        deltas.extend(told.deltas(event))

    trajectory = await service.ask(asked, watch)
    deltas.extend(told.last(trajectory))
    choice = {
        "index": 0,
        "message": message_of(deltas),
        "finish_reason": finish_reason(trajectory),
        "logprobs": _logprobs(service, trajectory) if asked.logprobs else None,
    }
    return {
        **_head(service, "chat.completion"),
        "choices": [choice],
        "usage": usage(trajectory),
        "unspiral": about(trajectory),
    }


def _logprobs(service: Service, trajectory: Trajectory) -> dict[str, Any]:
    texts = [service.agent.token_texts(a.token_ids) for a in trajectory.actions]
    return token_logprobs(trajectory, texts)


def _head(service: Service, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": service.name,
    }


class _Stream(EventSourceResponse):
    """The chunks of a request's answer. Its place is given back however it ends."""

    def __init__(self, service: Service, asked: ChatRequest, place: AsyncExitStack) -> None:
        super().__init__(_chunks(service, asked), ping=PING_SECONDS, sep="\n")
        self._place = place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._place:
            await super().__call__(scope, receive, send)


async def _chunks(service: Service, asked: ChatRequest) -> AsyncIterator[dict[str, str]]:
    """The events of a stream. An error after the first one is an event too."""
    head = _head(service, "chat.completion.chunk")

    def chunk(delta: dict[str, Any], **more: Any) -> dict[str, str]:
        choice = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None} | more
        return _event({**head, "choices": [choice]})

    events: asyncio.Queue[Event | None] = asyncio.Queue()
    work = asyncio.create_task(service.ask(asked, events.put_nowait))
    work.add_done_callback(lambda done: events.put_nowait(None))
    told = Told()
    try:
        yield chunk({"role": "assistant", "content": ""})
        while (event := await events.get()) is not None:
            for delta in told.deltas(event):
                yield chunk(delta)
        try:
            trajectory = await work
        except Exception as e:  # the status is sent: what is wrong can only be the last event
            status = getattr(e, "status", 500)
            service.metrics.refused.labels(str(status)).inc()
            if not explains(e):
                log.error("a question failed", exc_info=e)
            line = str(e) if explains(e) else f"internal error: {type(e).__name__}"
            yield _event(error_object(line, status))
            return
        for delta in told.last(trajectory):
            yield chunk(delta)
        if asked.logprobs:
            yield chunk({}, logprobs=_logprobs(service, trajectory))
        yield _event(
            {
                **head,
                "choices": [
                    {"index": 0, "delta": {}, "finish_reason": finish_reason(trajectory), "logprobs": None}
                ],
                "unspiral": about(trajectory),
            }
        )
        if asked.stream_options is not None and asked.stream_options.include_usage:
            yield _event({**head, "choices": [], "usage": usage(trajectory)})
        yield {"data": "[DONE]"}
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


def _event(data: dict[str, Any]) -> dict[str, str]:
    return {"data": json.dumps(data, ensure_ascii=False)}


async def _unless_left(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled where the client leaves first. Raises ClientDisconnect
    then."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(left())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
