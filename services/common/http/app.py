"""The application that a service begins with: behind the gate, with one kind of error, and with its pages."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI
from starlette.types import Lifespan

from services.common.http.faults import ALWAYS, install_faults
from services.common.http.gate import Gate
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
) -> FastAPI:
    """An application without routes. With a token, everything but health needs it; `refused` counts errors by
    status."""
    app = FastAPI(
        title=title,
        version="1",
        description=description,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # its redirects hold the client's Host
        responses=ALWAYS,
        lifespan=lifespan,
    )
    app.add_middleware(HeadAsGet)
    app.add_middleware(Gate, token=token)
    app.add_middleware(AnswerWhenStopped)  # the last added is the outermost
    install_faults(app, refused)
    add_pages(app, page_title, heading)
    return app
