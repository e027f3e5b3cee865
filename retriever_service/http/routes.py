"""The POST routes of the server, each with its documentation."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from retriever_service.http.forms.dialects import Dialects
from retriever_service.http.forms.leniency import CHANGED_HEADER
from retriever_service.http.forms.schemas import (
    AccessRequest,
    AccessResponse,
    BatchSearchRequest,
    Document,
    ErrorBody,
    FlatResponse,
    RerankRequest,
    RetrieveRequest,
    RetrieveResponse,
    SearchRequest,
    TextDocument,
)
from retriever_service.http.service import Service
from retriever_service.http.web import JsonEndpoint, RetrieverApp
from services.common.http.bodies import Room, schema_of

_ERRORS = {
    400: "The body is not JSON.",
    401: "A token is configured and was not sent.",
    403: "A foreign page sent the request, or it came under a name that is not the server's.",
    408: "Head or body did not come in time.",
    413: "The body is too large.",
    415: "The body is declared as something else than JSON in UTF-8.",
    422: "A field is wrong; the answer names it and what is accepted.",
    431: "The head of the request is too large.",
    500: "An error of the server itself.",
    503: "The index is loading, or the queue is full; the header Retry-After says when to try again.",
    504: "The deadline passed.",
}
ERROR_RESPONSES = {status: {"description": text, "model": ErrorBody} for status, text in _ERRORS.items()}
ALWAYS = {status: ERROR_RESPONSES[status] for status in (400, 401, 403, 422, 431, 500, 503)}
"""What any route may answer."""
_CHANGED = {
    CHANGED_HEADER.decode(): {
        "description": "What was changed of the request: a query cut, a limit lowered.",
        "schema": {"type": "string"},
    }
}


def add_routes(app: RetrieverApp, service: Service, bodies: Room) -> None:
    """Add the routes that search, order and look up passages. `bodies` is the room for what is in flight."""
    dialects = Dialects(service)

    def add(
        path: str, answer: Any, asked: type[BaseModel], answered: Any, more: dict | None = None, **texts: str
    ) -> None:
        whole = {"model": answered, "description": "The answer.", "headers": _CHANGED}
        app.add_endpoint(
            JsonEndpoint(path, answer, service.settings, service.metrics, bodies),
            responses={200: whole, **(more or {}), **ERROR_RESPONSES},
            openapi_extra={
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": schema_of(asked)}},
                }
            },
            **texts,
        )

    add(
        "/retrieve",
        dialects.retrieve,
        RetrieveRequest,
        FlatResponse | RetrieveResponse | list[TextDocument],
        summary="Search",
        description=(
            "The best passages for each query, best first. `queries` takes a list, `query` one string; "
            "a blank query finds nothing.\n\n"
            "```\ncurl -s localhost:8000/retrieve -H 'content-type: application/json' \\\n"
            '  -d \'{"queries": ["capital of Assyria"], "topk": 3, "return_scores": true}\'\n```'
        ),
    )
    add(
        "/rerank",
        service.rerank,
        RerankRequest,
        RetrieveResponse,
        {404: {"description": "No reranker is configured.", "model": ErrorBody}},
        summary="Order given passages",
        description=(
            "Orders the passages of list i by query i with a cross-encoder, best first. "
            "Takes what `/retrieve` returns. 404 where the server was started without `--reranker`."
        ),
    )
    add(
        "/search",
        dialects.search,
        SearchRequest,
        list[Document] | list[list[Document] | list[float]],
        summary="Search, as FlashRAG's server answers it",
        description=(
            "A list of passages for one query; with `return_score` a list of passages and a list of their "
            "scores."
        ),
    )
    add(
        "/batch_search",
        dialects.batch_search,
        BatchSearchRequest,
        list[list[Document]] | list[list[list[Document]] | list[list[float]]],
        summary="Search for several queries, as FlashRAG's server answers it",
        description="As `/search`, with a list for each query.",
    )
    add(
        "/access",
        dialects.access,
        AccessRequest,
        AccessResponse,
        summary="Whole rows of the corpus, by url or id",
        description=(
            "One row for each url, with all fields that the corpus has; null for an unknown one. "
            "Several passages with one url are one row with the contents of all. 422 where the index holds "
            "no whole rows."
        ),
    )
