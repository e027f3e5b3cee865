"""The application that a service begins with: behind the gate, with one kind of error, and with its pages."""

from __future__ import annotations

import json
from collections.abc import Callable

from fastapi import FastAPI
from starlette.types import Lifespan

from services.common.http.faults import ANY_ROUTE, PLAIN, FaultForm, described, install_faults
from services.common.http.gate import HEALTH, Gate
from services.common.http.heads import HeadAsGet
from services.common.http.pages import add_pages
from services.common.http.stopping import AnswerWhenStopped


def new_app(
    title: str,
    description: str,
    page_title: str,
    heading: str,
    token: str | None,
    refused: Callable[[int], None],
    lifespan: Lifespan[FastAPI] | None = None,
    form: FaultForm = PLAIN,
    open_paths: frozenset[str] = HEALTH,
) -> FastAPI:
    """An application without routes. With a token, everything but `open_paths` needs it; `refused` counts
    errors by status; `form` is that of its errors."""
    app = FastAPI(
        title=title,
        version="1",
        description=description,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # its redirects hold the client's Host
        responses=described(*ANY_ROUTE, model=form.model),
        lifespan=lifespan,
    )
    app.add_middleware(HeadAsGet)

    def at_the_gate(detail: str, field: str | None, limit: str | None) -> bytes:
        return json.dumps(form.write(detail, 401 if field == "authorization" else 403, field)).encode()

    def when_stopped(detail: str, field: str | None, limit: str | None) -> bytes:
        return json.dumps(form.write(detail, 503, field)).encode()

    app.add_middleware(Gate, token=token, open_paths=open_paths, fault=at_the_gate)
    app.add_middleware(AnswerWhenStopped, fault=when_stopped)  # the last added is the outermost
    install_faults(app, refused, form)
    add_pages(app, page_title, heading)
    return app
